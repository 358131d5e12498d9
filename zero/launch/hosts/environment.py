"""Which variables the ranks get from the launcher's environment and from .deepspeed_env and .zero_env."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zero.launch.contract import SECRET_VARIABLE
from zero.launch.launch_messages import LaunchError, raise_all, text_of

# What steers the communication, Python, torch and which kernels round, and so has to be the same on every host. What
# belongs to one host, such as PATH or HOME, stays out.
PREFIXES = (
    "ATEN_", "CUBLAS", "DNNL_", "GLOO_", "MKL_", "MLFLOW", "MV2", "NCCL", "OMP_", "ONEDNN_", "PYTHON", "PYTORCH",
    "TORCH", "UCX", "ZERO_",
)  # fmt: skip
NEVER = ("TORCHELASTIC", SECRET_VARIABLE)  # of an agent that this launcher itself runs under; not for command lines
FILES = (".deepspeed_env", ".zero_env")
# What the launcher decides, and the flag for it: a file would be overruled in silence.
OURS = {
    "RANK": "--node_rank", "LOCAL_RANK": "--include", "WORLD_SIZE": "--num_nodes", "LOCAL_WORLD_SIZE": "--num_gpus",
    "NODE_RANK": "--node_rank", "MASTER_ADDR": "--master_addr", "MASTER_PORT": "--master_port",
    "CUDA_VISIBLE_DEVICES": "--include", SECRET_VARIABLE: "the environment of each host's launcher, with --no_ssh",
}  # fmt: skip
# Of names that say so, values stand on no command line: who lists the processes of a host would read them.
_SECRET = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COMMENT = re.compile(r"\s+#.*")


class Variables(NamedTuple):
    """Variables for every rank, and the files that some of them are from."""

    values: dict[str, str]
    files: tuple[str, ...]


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that go to the other hosts, sorted by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        # An exported function of bash has a name that `env` would take, and a shell on the other side would not.
        if name.startswith(PREFIXES) and not name.startswith(NEVER) and _NAME.fullmatch(name)
    }


def is_secret(name: str) -> bool:
    """Whether the value of a variable is nobody's business, by its name."""
    return _SECRET.search(name) is not None


def from_files(environment: Mapping[str, str], folder: Path, extra: str | None = None, usual: bool = True) -> Variables:
    """The variables of `FILES` in the home folder, then in `folder`, then of the file `extra`; a later one wins.

    DS_ENV_FILE is another name for .deepspeed_env. `usual` False: `extra` only. All that is
    wrong is said at once, with file and line.
    """
    names = [environment.get("DS_ENV_FILE") or FILES[0], *FILES[1:]]
    homes = [Path(environment["HOME"])] if environment.get("HOME") else []
    paths = [place / name for place in dict.fromkeys([*homes, folder]) for name in names]
    files = [path for path in dict.fromkeys(paths) if path.exists()] if usual else []
    if extra is not None:
        # Moved to the end where it is one of the others, too, as it is the one that was named.
        named = folder / extra
        if not named.exists():
            raise LaunchError(f"--env_file: there is no file {extra!r}")
        files = [*(path for path in files if path != named), named]
    problems: list[str] = []
    values: dict[str, str] = {}
    for path in files:
        try:
            values.update(parse(text_of(path), str(path), problems))
        except LaunchError as error:
            problems.append(str(error))
    raise_all(problems)
    return Variables(values, tuple(str(path) for path in files))


def parse(text: str, path: str, problems: list[str]) -> dict[str, str]:
    """The variables of a file's `text`, a line NAME=VALUE each; what is wrong is added to `problems`.

    Blank lines and those that begin with # are skipped, and so is `export` in front. A value in quotes, single or
    double, is what stands between them; another one ends where a # follows a space. Nothing is expanded: a $ is a $.
    """
    variables: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = re.sub(r"^export\s+", "", line).partition("=")
        if not equals:
            problems.append(f"{path}:{number}: {line!r}: wanted NAME=VALUE")
        elif not _NAME.fullmatch(name):
            problems.append(f"{path}:{number}: {name!r} is not the name of a variable (no spaces around the =)")
        elif name in OURS:
            problems.append(f"{path}:{number}: {name} is set by the launcher; use {OURS[name]}")
        elif (plain := _value(value)) is None:
            problems.append(f"{path}:{number}: {line!r}: the quotes do not match, or something follows them")
        elif "\0" in plain:
            problems.append(f"{path}:{number}: {name}: no value can have a zero byte in it")
        else:
            variables[name] = plain
    return variables


def _value(text: str) -> str | None:
    """The value that `text` writes; None where its quotes are wrong."""
    quote = text.strip()[:1]
    if quote not in ("'", '"'):
        return _COMMENT.sub("", text).strip()
    inside, end, rest = text.strip()[1:].partition(quote)
    return inside if end and (not rest or _COMMENT.fullmatch(rest)) else None
