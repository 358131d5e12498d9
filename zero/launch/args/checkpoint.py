"""The command lines of `zero consolidate`, `zero verify` and `zero import-deepspeed`."""

import argparse

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


def add_commands(commands) -> None:
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
