"""The command `zero`. Nothing heavy is imported before it is needed, so that help comes at once."""

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from zero.launch.args import run as run_args
from zero.launch.args import scripts as script_args
from zero.launch.args import tools as tool_args
from zero.launch.contract import CLOSED_PIPE


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; leaves with the usage of the command that was meant where they are wrong."""
    parser, commands = _parser()
    _complete(parser)
    if not words:
        parser.print_help()
        parser.exit()
    first = words[0]
    if not first.startswith("-") and first not in commands.choices:
        from zero.config.instead import did_you_mean

        run = f"; did you mean 'zero run {first}'?" if os.path.exists(first) else did_you_mean(first, commands.choices)
        parser.error(f"there is no command {first!r}{run} There are: {', '.join(commands.choices)}")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        from zero.config.instead import did_you_mean

        command = commands.choices[args.command]
        flag = unknown[0].partition("=")[0]
        near = did_you_mean(flag, re.findall(r"--[\w-]+", command.format_help())) if flag.startswith("-") else "."
        command.error(f"there is no option {flag}{near} `zero {args.command} --help` lists them")
    return args


def _parser() -> tuple[argparse.ArgumentParser, Any]:
    """The parser, and those of the commands."""
    parser = argparse.ArgumentParser(
        prog="zero", description="ZeRO for PyTorch: run a script, describe its config, look around.", allow_abbrev=False
    )
    version = f"zero {sys.modules['zero'].__version__}"  # of the package that this module is in
    parser.add_argument("--version", action="version", version=version, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    about = "start a script with one process per rank"
    run_args.add_arguments(commands.add_parser("run", help=about, allow_abbrev=False))
    about = "compare a script's first steps under each stage with plain torch"
    script_args.add_check(commands.add_parser("check", help=about, allow_abbrev=False))
    about = "find the fastest configuration of a script, by a plan and short runs"
    script_args.add_tune(commands.add_parser("tune", help=about, allow_abbrev=False))
    about = "print the JSON Schema of the config, for an editor to complete and check the file with"
    commands.add_parser("schema", help=about, description=about, allow_abbrev=False)
    about = "ask what a run shall be like, say what memory it takes, and write its configuration"
    tool_args.add_config(commands.add_parser("config", help=about, allow_abbrev=False))
    _add_report(commands)
    _add_top(commands)
    about = "start ranks, let them talk, and say what this machine lacks and how to get it"
    ends = "The exit status is 1 when there is a problem. What is installed, and how fast it is, zero report says."
    commands.add_parser("doctor", help=about, description=f"{about}. {ends}", allow_abbrev=False)
    about = "print the memory that a model takes per rank, or the groups of ranks along each axis"
    tool_args.add_plan(commands.add_parser("plan", help=about, description=about, allow_abbrev=False))
    tool_args.add_checkpoints(commands)
    return parser, commands


def _add_report(commands) -> None:
    about = "print versions, the compiled kernels that run on this machine, and how fast they are"
    ends = "The exit status is 1 when something is missing that should be there, such as compiled kernels."
    parser = commands.add_parser("report", help=about, description=f"{about}. {ends}", allow_abbrev=False)
    parser.add_argument("--no-measure", action="store_true", help="leave out the two seconds of measuring")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    about = "instead make one HTML file of what a run has written to this folder, even if it was killed"
    parser.add_argument("--run", metavar="DIR", help=about)
    parser.add_argument("--out", metavar="FILE", help="with --run: the file to write (default: DIR/report.html)")


def _add_top(commands) -> None:
    about = "a table that stays up to date: what each rank of a run does, from its folder"
    parser = commands.add_parser("top", help=about, description=about, allow_abbrev=False)
    parser.add_argument("folder", metavar="DIR", help='the folder that the run writes: "zero": {"report": "DIR"}')
    parser.add_argument("--once", action="store_true", help="print the table once as plain text, for scripts")


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks what may come next: `eval "$(register-python-argcomplete zero)"` makes it ask."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the one of this process) and return the exit status."""
    try:
        try:
            return _command(_parsed(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # so that a closed pipe shows here, and not when Python ends, which says so
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. What is still in the buffer has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _command(args: argparse.Namespace) -> int:
    try:
        return _COMMANDS.get(args.command, _checkpoint)(args)
    except run_args.LaunchError as error:
        return _refuse(args.command, error)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _refuse(args.command, f"{error.strerror}: {error.filename}")
    except KeyboardInterrupt:  # of `run`: before the agent handles signals, and so before anything runs
        return 130


def _refuse(what: str, error: object) -> int:
    print(f"zero {what}: error: {error}", file=sys.stderr)
    return 2


def _check_config(config: run_args.ConfigFlags) -> None:
    """Raise `LaunchError` for a configuration on the command line that the ranks would refuse."""
    config.check()
    if config.file is not None or config.sets:
        from zero.config.check import problems  # what starts no ranks with a configuration need not wait for it

        if found := problems(config.file, config.sets):
            raise run_args.LaunchError("--config and --set:\n" + "\n".join(found))


def _run(args: argparse.Namespace) -> int:
    request = run_args.request(args)
    _check_config(request.config)
    from zero.launch import start

    return start.run(request, lambda hosts: _groups(request.config, hosts))


def _groups(config: run_args.ConfigFlags, hosts: Sequence[int]) -> list[str]:
    """The groups of a run, of so many ranks on each host, along the axes that its configuration names."""
    if config.file is None and not config.sets:
        return []
    from zero.config.check import group_lines
    from zero.config.errors import ConfigError

    try:
        return group_lines(config.file, config.sets, hosts)
    except ConfigError as error:
        raise run_args.LaunchError(f"--config and --set: {error}") from None


def _check(args: argparse.Namespace) -> int:
    try:
        request = script_args.check_request(args)
        request.check()
        _check_config(request.config)
        from zero.tools import check

        return check.run(request)
    except ValueError as error:
        return _refuse("check", error)


def _tune(args: argparse.Namespace) -> int:
    request = script_args.tune_request(args)
    request.check()
    _check_config(request.config)
    from zero.tools.tune import tuning

    return tuning.run(request)


def _schema(args: argparse.Namespace) -> int:
    from zero.tools.whole_schema import whole_schema

    print(json.dumps(whole_schema(), indent=2))
    return 0


def _report(args: argparse.Namespace) -> int:
    if args.run is not None:
        from zero.tools.report import page

        return page.command(args.run, args.out)
    if args.out is not None:
        return _refuse("report", "--out names the file of --run DIR; give both")
    from zero.tools.report import machine

    return machine.run(measured=not args.no_measure, as_json=args.json)


def _config(args: argparse.Namespace) -> int:
    from zero.tools import config_command

    return config_command.run(args)


def _top(args: argparse.Namespace) -> int:
    from zero.tools import top

    return top.run(args.folder, args.once)


def _doctor(args: argparse.Namespace) -> int:
    from zero.tools import doctor

    return doctor.run()


def _plan(args: argparse.Namespace) -> int:
    from zero.tools.plan import plan_command

    return plan_command.run(args)


def _checkpoint(args: argparse.Namespace) -> int:
    from zero.tools import checkpoints

    return checkpoints.run(args)


_COMMANDS = {
    "run": _run,
    "check": _check,
    "tune": _tune,
    "plan": _plan,
    "schema": _schema,
    "report": _report,
    "top": _top,
    "config": _config,
    "doctor": _doctor,
}


if __name__ == "__main__":
    sys.exit(main())
