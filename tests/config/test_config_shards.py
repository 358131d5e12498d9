"""The promise: keys that cut state over fewer ranks than the world give one size, or an error with the numbers.

So do those of what travels in 8 bits.
"""

import pytest

from zero.config import ConfigError, load


def errors(source, world_size) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, world_size)
    return str(caught.value)


def shards(shard_size=0, **keys) -> dict:
    return {"train_batch_size": 8, "zero": {"shard_size": shard_size}, "zero_optimization": keys}


@pytest.mark.parametrize(
    ("section", "more", "lines"),
    [
        (
            {"stage": 2, "zero_quantized_weights": True},
            {},
            "zero_optimization.zero_quantized_weights: got true with zero_optimization.stage 2, where parameters are "
            "not gathered for their use; set the stage to 3, or leave it out",
        ),
        (
            {"zero_quantized_gradients": True},
            {},
            "zero_optimization.zero_quantized_gradients: got true with zero_optimization.stage 0, where every rank "
            "needs the whole sum; set the stage to 1, 2 or 3, or leave it out",
        ),
        (
            {"stage": 2, "zero_quantized_gradients": True},
            {"zero": {"reduce": "tree"}},
            "zero_optimization.zero_quantized_gradients: got true with zero.reduce 'tree', whose sum no world size "
            "changes; keep one of the two",
        ),
        (
            {"stage": 2, "zero_quantized_gradients": True},
            {"communication_data_type": "bf16"},
            "zero_optimization.zero_quantized_gradients: got true with communication_data_type 'bf16', another form of "
            "what travels; keep one of the two",
        ),
    ],
)
def test_8_bits_travel_where_something_does_and_in_one_form(section, more, lines):
    assert errors({"train_batch_size": 8, "zero_optimization": section, **more}, 4) == lines


@pytest.mark.parametrize(
    ("given", "world", "lines"),
    [
        (
            shards(2, mics_shard_size=4, stage=3),
            4,
            "zero.shard_size and zero_optimization.mics_shard_size: got 2 and 4 for one size; keep one of them",
        ),
        (
            shards(mics_shard_size=2),
            4,
            "zero_optimization.mics_shard_size: got 2 with zero_optimization.stage 0, where every rank keeps all "
            "state; set the stage to 1, 2 or 3, or leave it out",
        ),
        (shards(3, stage=1), 4, "zero.shard_size: got 3, wanted a divisor of world size 4: 1, 2, 4"),
        (
            shards(mics_shard_size=8, stage=2),
            4,
            "zero_optimization.mics_shard_size: got 8, wanted a divisor of world size 4: 1, 2, 4",
        ),
        (
            shards(mics_shard_size=-2, stage=2),
            4,
            "zero_optimization.mics_shard_size: got -2, wanted an integer of at least -1",
        ),
        (
            shards(zero_hpz_partition_size=3, stage=2),
            4,
            "zero_optimization.zero_hpz_partition_size: got 3 with zero_optimization.stage 2, which keeps whole "
            "parameters on every rank; set the stage to 3, or leave it out\n"
            "zero_optimization.zero_hpz_partition_size: got 3, wanted a divisor of world size 4: 1, 2, 4",
        ),
        (
            shards(2, zero_hpz_partition_size=2, stage=3),
            4,
            "zero_optimization.zero_hpz_partition_size: got 2 with zero.shard_size 2; it is for state that is cut over "
            "all ranks, keep one of the two",
        ),
    ],
)
def test_shard_sizes_that_do_not_fit(given, world, lines):
    assert errors(given, world) == lines


@pytest.mark.parametrize(
    ("given", "shard_size", "secondary"),
    [
        (shards(stage=3), 0, 1),
        (shards(-1, mics_shard_size=0, stage=0), 0, 1),
        (shards(1, stage=1), 1, 1),
        (shards(mics_shard_size=2, stage=2), 2, 1),
        (shards(2, mics_shard_size=2, stage=3), 2, 1),
        (shards(4, mics_shard_size=-1, stage=3), 0, 1),
        (shards(zero_hpz_partition_size=2, stage=3), 0, 2),
        (shards(zero_hpz_partition_size=4, stage=3), 0, 1),
    ],
)
def test_shard_sizes_that_fit(given, shard_size, secondary):
    config = load(given, 4)
    assert (config.shard_size, config.secondary_shard_size) == (shard_size, secondary)
