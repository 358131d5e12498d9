"""What other systems have, on top of the engine: checkpoints of DeepSpeed, and its loader of shared sequences."""
