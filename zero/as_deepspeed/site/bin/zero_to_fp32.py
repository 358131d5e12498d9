#!/usr/bin/env python3
"""Write the exact fp32 weights of a checkpoint, as DeepSpeed's script of this name does; zero is enough to run it.

zero_to_fp32.py CHECKPOINT OUTPUT [-t TAG] [--max_shard_size 5GB]
"""

import argparse
import sys

from zero.__main__ import main

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint_dir", help="the folder that was saved to")
parser.add_argument("output_dir", help="a folder in the layout of Hugging Face, or a name that ends in .safetensors")
parser.add_argument("-t", "--tag", help="which checkpoint of the folder (default: what its file `latest` names)")
parser.add_argument("--max_shard_size", help="the most bytes of a file (default: 5GB)")
parser.add_argument("--safe_serialization", action="store_true", help="taken; files are always safetensors")
parser.add_argument("-d", "--debug", action="store_true", help="taken; without effect")
args = parser.parse_args()
words = ["consolidate", args.checkpoint_dir, args.output_dir]
words += ["--tag", args.tag] if args.tag else []
words += ["--max-shard-size", args.max_shard_size] if args.max_shard_size else []
sys.exit(main(words))
