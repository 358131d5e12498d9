"""What `engine.offload_states` takes, by name."""

import enum

from zero.engine.state_offload import STATES

OffloadDeviceEnum = enum.Enum("OffloadDeviceEnum", {each: each for each in ("none", "cpu", "nvme")}, type=str)
OffloadStateTypeEnum = enum.Enum("OffloadStateTypeEnum", {each: each for each in STATES}, type=str)
