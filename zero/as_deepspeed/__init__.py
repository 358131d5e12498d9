"""A door for programs that were written for DeepSpeed: from here on `import deepspeed` gives zero.

    import zero.as_deepspeed                                 # first line of a script
    python -m zero.as_deepspeed script.py                    # or: -m accelerate.commands.launch script.py
    eval "$(python -m zero.as_deepspeed --shell)"            # then: accelerate launch script.py, torchrun script.py
    zero run --as-deepspeed script.py

All four do the same: a folder with a package `deepspeed` and its metadata comes first on the path of this process and
of those that it starts. It holds names only; what they mean is `zero`. A DeepSpeed that is installed is out of sight as
long as a door is open, which is logged, and is what `import deepspeed` gives where none is.
"""

import importlib
import logging
import os
import sys

from zero.launch.as_deepspeed import SITE, is_open, note, variables
from zero.log import rank_zero

# Each of them has looked for DeepSpeed, and would go on without it, or with another one.
_LOOKED = ("deepspeed", "accelerate.utils", "transformers.integrations.deepspeed", "trl.import_utils", "lightning")


def _open() -> None:
    if SITE in sys.path:  # a door was open when this process started
        return
    if late := [name for name in _LOOKED if name in sys.modules]:
        raise RuntimeError(f"import zero.as_deepspeed before {', '.join(late)}, which has looked for deepspeed already")
    sys.path.insert(0, SITE)
    importlib.invalidate_caches()
    if not is_open(os.environ):
        rank_zero(logging.INFO, "%s", note())
        os.environ.update(variables(os.environ))


_open()
