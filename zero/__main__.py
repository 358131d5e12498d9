"""The command `zero`. Nothing heavy is imported before it is needed, so that help comes at once."""

import argparse
import json
import sys
from collections.abc import Sequence

from zero.launch import args as run_args


class _Version(argparse.Action):
    """Looks the version up only when it is asked for, as that takes longer than all of the help."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Print the version and leave."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("zero")
        except PackageNotFoundError:
            found = "(not installed)"
        print(f"zero {found}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zero", description="ZeRO for PyTorch: run a script, describe its config.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run_args.add_arguments(
        commands.add_parser("run", help="start a script with one process per rank", allow_abbrev=False)
    )
    about = "print the JSON Schema of the config, for an editor to complete and check the file with"
    commands.add_parser("schema", help=about, description=about, allow_abbrev=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the one of this process) and return the exit status."""
    given = _parser().parse_args(argv)
    if given.command == "schema":
        return _schema()
    return _run(given)


def _schema() -> int:
    from zero.config import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _run(given: argparse.Namespace) -> int:
    try:
        request = run_args.request(given)
        request.check()
        from zero.launch import agent

        return agent.run(request)
    except run_args.LaunchError as error:
        print(f"zero run: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the agent handles signals, and so before anything runs
        return 130


if __name__ == "__main__":
    sys.exit(main())
