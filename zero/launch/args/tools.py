"""The command lines of `zero plan` and of the commands for checkpoints."""

import argparse

from zero.launch.args.hosts import above_zero, at_least

MOST_RANKS = 1 << 20
_SIZES = {
    "tp": "ranks of tensor parallelism, which are consecutive",
    "pp": "stages of the pipeline",
    "cp": "ranks that share one sequence",
    "sp": "the same as --cp",
    "ep": "ranks that experts are divided among, which are consecutive",
    "dp_shard": "ranks that state is cut over; default: all that the other sizes leave",
    "dp_replicate": "times that cut state is repeated (HSDP)",
}
_FOLDER = "a checkpoint, or the folder that it was saved to, whose file `latest` then names the checkpoint"
_CONSOLIDATE = """Write the model of a checkpoint as one safetensors file, or in the layout of Hugging Face.

Parameters and buffers have the names that they have in the model; of tied ones the file has the first, and its
metadata names the others. All bytes that are read are compared with their checksums. Memory is a few MiB, whatever
the size of the model. The exit status is 1 when the checkpoint is damaged or the model cannot be written."""
_VERIFY = """Read a checkpoint and compare every byte of its tensors with the checksums of its index.

Everything that is missing or damaged is listed, with tensor and file, and the exit status is 1 then. Files that belong
to no checkpoint, such as what a save that was killed has left, are named and are no error."""
_IMPORT = """Write a checkpoint of DeepSpeed (ZeRO 1, 2 or 3) as one of zero, which loads at any world size and stage.

Weights, fp32 masters, the optimizer's state, step numbers and buffers are taken. DeepSpeed is not needed. Its files
may hold code: only tensors, plain containers and the few classes that DeepSpeed itself puts there are read; a
file with anything else is refused, and nothing in it runs. OUT is made as engine.save_checkpoint(OUT) makes it."""
_CONFIG = """Ask what a run shall be like and write its configuration: a JSON that `zero.initialize` takes as it is.

Each question has a default, which an empty answer takes; for stage and placement the memory of each choice is shown,
as by zero plan. What --set says is not asked. Questions and memory go to stderr. The exit status is 0 when the JSON was
written, and 2 when there is an error in what was given, a file in the way, or no terminal to ask at."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero plan`."""
    about = (
        "module:function, which gives a model and its inputs, or a folder with the config.json of a Hugging Face model"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    parser.add_argument("--groups", action="store_true", help="print the groups of ranks along each axis")
    about = "print the GB per rank of a transformer of N parameters, such as 70B, for each stage and placement"
    parser.add_argument("--params", type=above_zero, metavar="N", help=about)
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="its layers (default: a 128th of the width)")
    parser.add_argument("--width", type=at_least(1), metavar="N", help="its width (default: 128 times the layers)")
    about = (
        "with it, time too: the name of a device such as h200 or a100, or measured: this machine, which is tried for "
    )
    about += "some seconds. cuda (the default) and cpu: bytes only, with a memory of its own or that of the host"
    parser.add_argument("--device", type=str.lower, default="cuda", metavar="NAME", help=about)
    parser.add_argument(
        "--sequence",
        type=at_least(1),
        metavar="N",
        help="tokens of a sample, where the model is no function (default: 4096)",
    )
    about = "write the configuration of the fastest that fits, to a file or to where the table goes"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=about)
    parser.add_argument("--all", action="store_true", help="print all rows, and not the best of each choice")
    parser.add_argument("--nodes", type=at_least(1), metavar="N", help="the number of hosts")
    parser.add_argument("--config", metavar="FILE", help="the JSON of the run (default: bf16 and AdamW)")
    about = "the number of ranks; several, as in 8,16,32, are compared (default: 1 to 1024)"
    parser.add_argument("--world", type=_counts, metavar="N", help=about)
    for axis, about in _SIZES.items():
        parser.add_argument(f"--{axis.replace('_', '-')}", type=at_least(1), metavar="N", help=about)
    about = "without --nodes (default: 8)"
    parser.add_argument("--ranks-per-host", type=at_least(1), default=8, metavar="N", help=about)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero config`."""
    parser.description = _CONFIG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--default", action="store_true", help="ask nothing: take the defaults")
    about = "set a value by its path, such as zero_optimization.stage=3; the value is JSON or text; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    about = "the file to write (default: %(default)s); - prints the JSON"
    parser.add_argument("-o", "--output", default="zero.json", metavar="FILE", help=about)
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    about = "parameters of the model, for the memory that is shown (asked; 1e9 by default)"
    parser.add_argument("--params", type=above_zero, metavar="N", help=about)
    parser.add_argument("--world", type=at_least(1, MOST_RANKS), metavar="N", help="ranks (asked; 8 by default)")
    about = "memory of one device, of which 60 %% may hold state (asked; 80 by default)"
    parser.add_argument("--memory", type=above_zero, metavar="GB", help=about)
    about = "cuda: a device with memory of its own (the default); cpu: ranks that train in host memory"
    parser.add_argument("--device", type=str.lower, choices=("cuda", "cpu"), default="cuda", help=about)


def _counts(text: str) -> list[int]:
    return sorted({at_least(1, MOST_RANKS)(count) for count in text.split(",")})


def add_checkpoints(commands) -> None:
    """Give the sub-parsers `commands` those of checkpoints."""
    parser = _command(commands, "consolidate", "write the model of a checkpoint in safetensors", _CONSOLIDATE)
    about = "a file, if it ends in .safetensors; else a folder in the layout of Hugging Face"
    parser.add_argument("out", metavar="OUT", help=about)
    about = "of the parameters; fp32, the default, gives the exact values of the optimizer's masters"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help=about)
    about = "the most bytes of a file in a folder (default: 5GB)"
    parser.add_argument("--max-shard-size", metavar="SIZE", help=about)
    parser.add_argument("--hf", action="store_true", help="OUT is a folder in any case")
    parser = _command(commands, "verify", "compare a checkpoint with its checksums", _VERIFY)
    parser.add_argument("--all", action="store_true", help="all checkpoints in the folder")
    parser = _command(commands, "import-deepspeed", "make a checkpoint of zero from one of DeepSpeed", _IMPORT)
    parser.add_argument("out", metavar="OUT", help="the folder to save to, as of engine.save_checkpoint")


def _command(commands, name: str, about: str, description: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help=_FOLDER)
    parser.add_argument("--tag", metavar="TAG", help="which checkpoint of the folder (default: what `latest` names)")
    return parser
