"""The five schedules of DeepSpeed, and what it calls them and their parameters."""

from deepspeed._names import finder

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
LR_SCHEDULE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "lr_schedule", "log", "linear"

# Each is its own name in small letters.
_KEYS = """
    LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE EDGE_VALUE MID_VALUE
    CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE
    CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR
    WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS
"""
globals().update({name: name.lower() for name in _KEYS.split()})

__getattr__ = finder(__name__, dict.fromkeys(VALID_LR_SCHEDULES, "zero.optim.lr"))
