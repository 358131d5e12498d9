"""The five schedules of DeepSpeed, by name."""

from deepspeed._names import finder

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES

__getattr__ = finder(__name__, dict.fromkeys(VALID_LR_SCHEDULES, "zero.optim.lr"))
