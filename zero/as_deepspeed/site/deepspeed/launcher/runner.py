"""What `accelerate launch` imports of DeepSpeed's launcher; the launcher itself is `zero run`."""

import os

from deepspeed._names import finder

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
PDSH_MAX_FAN_OUT = 1024

__getattr__ = finder(__name__, {})
