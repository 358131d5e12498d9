"""The promise: what a checkpoint and an engine do not have in common is named, all of it at once, or loaded right.

Strict loading refuses with every difference and changes nothing; the options, tied, frozen and other optimizers'
parameters do what they say.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_small import BF16, Small, assert_equal, engine_of, held, loaded, refused, saved, train
from ranks import listening
from torch import nn

import zero
from zero.checkpoint.index import Damaged


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    saved(tmp_path, engine_of(Small()))
    other = Small(width=4, more=True)
    del other.third
    other.third = nn.Linear(6, 4, bias=False)
    text = refused(
        engine_of(other),
        tmp_path,
        "not in the checkpoint: 'added.weight', 'added.bias', 'counted'",
        "not in the model: 'third.bias'",
        "'first.weight' has shape (4, 6), in the checkpoint (5, 6)",
        "'second.weight' has shape (6, 4), in the checkpoint (6, 5)",
        "'third.weight' has shape (4, 6), in the checkpoint (5, 6)",
        "buffer 'norm.running_mean' has shape (4,), in the checkpoint (5,)",
        "load_module_strict=False",
    )
    assert text.count("has shape") == 6
    refused(engine_of(Small(width=4, more=True)), tmp_path, "has shape", load_module_strict=False)


def test_dtypes_that_cannot_be_converted(tmp_path: Path) -> None:
    def with_bytes(dtype: torch.dtype) -> nn.Module:
        model = Small()
        model.codes = nn.Parameter(torch.arange(7).to(dtype), requires_grad=False)
        model.register_buffer("table", torch.zeros(2, dtype=torch.int64 if dtype == torch.int8 else torch.float32))
        return model

    saved(tmp_path, engine_of(with_bytes(torch.int8)))
    refused(
        engine_of(with_bytes(torch.float32)),
        tmp_path,
        "'codes' is fp32, in the checkpoint int8, which cannot be converted",
        "buffer 'table' is fp32, in the checkpoint int64, which cannot be converted",
    )
    engine = engine_of(with_bytes(torch.int8))
    engine.load_checkpoint(tmp_path)
    with zero.GatheredParameters(engine.module.codes):
        assert engine.module.codes.tolist() == list(range(7))


def test_not_strict_keeps_what_is_new_and_names_both(tmp_path: Path) -> None:
    model = Small()
    model.gone = nn.Linear(2, 2)
    model.register_buffer("old", torch.ones(1))
    source = held(saved(tmp_path, engine_of(model)))
    engine = engine_of(Small(more=True))
    train(engine, 3, first=20)
    before = held(engine)
    with listening() as said:
        after = held(loaded(tmp_path, engine, load_module_strict=False))
    new = [name for name in after if "added" in name or "counted" in name]
    assert len(new) == 11
    wanted = {name: source.get(name, source["step gone.bias"]) for name in after}
    assert_equal(after, wanted | {name: before[name] for name in new if not name.startswith("step")})
    assert sum("'added.weight', 'added.bias', 'counted'" in line for line in said) == 1
    assert sum("'gone.weight', 'gone.bias', 'old'" in line for line in said) == 1


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Lion", "RMSprop"])
def test_another_optimizer_is_refused_and_its_weights_are_not(tmp_path: Path, kind: str) -> None:
    source = saved(tmp_path, engine_of(Small()))
    params = {"lr": 1e-2, **({"momentum": 0.9} if kind == "SGD" else {})}
    engine = engine_of(Small(), optimizer={"type": kind, "params": params})
    fresh = held(engine_of(Small(), optimizer={"type": kind, "params": params}))
    refused(
        engine,
        tmp_path,
        "'first.weight' has the moments exp_avg, exp_avg_sq there and the moments",
        "load_optimizer_states=False",
    )
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    wanted = {name: held(source).get(name, value) for name, value in fresh.items()}
    wanted |= {name: value for name, value in fresh.items() if name.startswith(("step", "exp_avg"))}
    assert_equal(held(engine), wanted)
    assert engine.global_steps == 2


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, engine_of(Small(), scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}))
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}
    engine = engine_of(Small(), scheduler=cycle)
    refused(engine, tmp_path, "a learning-rate scheduler WarmupLR", "load_lr_scheduler_states=False")
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.global_steps == 2


class Torn(torch.optim.lr_scheduler.ConstantLR):
    """Its state cannot be loaded, which shows when all else is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("factor")


def test_a_schedule_that_cannot_take_its_state_tears_the_engine(tmp_path: Path) -> None:
    def made() -> Any:
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
        return zero.initialize(model=model, optimizer=optimizer, lr_scheduler=Torn(optimizer), config=config)[0]

    source = held(saved(tmp_path, made()))
    engine = made()
    with pytest.raises(ValueError, match="the learning-rate scheduler Torn does not fit: KeyError: 'factor'"):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(RuntimeError, match="half loaded"):
        train(engine, 1)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert_equal(held(engine), source)
    train(engine, 1)


def test_parameters_in_other_groups(tmp_path: Path) -> None:
    def grouped(model: Small, *prefixes: str) -> Any:
        groups: list[dict[str, Any]] = [{"params": []} for _ in prefixes]
        for name, param in model.named_parameters():
            groups[next(index for index, prefix in enumerate(prefixes) if name.startswith(prefix))]["params"].append(
                param
            )
        return engine_of(model, groups=groups)

    source = saved(tmp_path, grouped(Small(), "first", ""))
    refused(
        grouped(Small(), "third", ""),
        tmp_path,
        "in parameter group 1 there and in group 0 here: 'third.weight', 'third.bias'",
        "in parameter group 0 there and in group 1 here: 'first.weight', 'first.bias'",
        "initialize() with the parameter groups of then, in their order, loads it whole",
    )
    refused(engine_of(Small()), tmp_path, "in parameter group 1 there and in group 0 here")
    engine = grouped(Small(), "first", "")
    engine.load_checkpoint(tmp_path)
    assert_equal(held(engine), held(source))


def test_tied_into_untied_and_back(tmp_path: Path) -> None:
    source = held(saved(tmp_path / "tied", engine_of(Small(tied=True))))
    engine = loaded(tmp_path / "tied", engine_of(Small()))
    found = held(engine)
    for key in ("", "exact ", "exp_avg ", "exp_avg_sq ", "step "):
        assert torch.equal(found[f"{key}first.weight"], source[f"{key}first.weight"])
        assert torch.equal(found[f"{key}third.weight"], source[f"{key}first.weight"])
    engine.save_checkpoint(tmp_path / "equal")
    assert_equal(held(loaded(tmp_path / "equal", engine_of(Small(tied=True)))), source)

    train(engine, 1)
    engine.save_checkpoint(tmp_path / "unequal")
    text = "'first.weight' is tied here; 'first.weight' and 'third.weight' of the checkpoint have other values"
    refused(engine_of(Small(tied=True)), tmp_path / "unequal", text)


def test_other_names_of_a_tied_parameter(tmp_path: Path) -> None:
    """The one that the checkpoint has it by is not the one by which the engine knows it."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.third = nn.Linear(6, 5)
            self.first = nn.Linear(6, 5)
            self.first.weight = self.third.weight
            self.norm, self.second = nn.BatchNorm1d(5, affine=False), nn.Linear(5, 6)

        forward = Small.forward

    source = held(saved(tmp_path, engine_of(Small(tied=True))))
    engine = engine_of(Turned())
    engine.load_checkpoint(tmp_path)
    assert torch.equal(held(engine)["exp_avg third.weight"], source["exp_avg first.weight"])


@pytest.mark.parametrize("more", [{}, BF16])
def test_frozen_and_trained(tmp_path: Path, more: dict[str, Any]) -> None:
    trained = held(saved(tmp_path / "trained", engine_of(Small(), **more)))
    engine = loaded(tmp_path / "trained", engine_of(Small(frozen="third"), **more))
    found = held(engine)
    assert_equal(found, {name: trained[name] for name in found})

    train(engine, 1)
    frozen = held(engine)
    engine.save_checkpoint(tmp_path / "frozen")
    engine = engine_of(Small(), **more)
    train(engine, 2)
    with listening() as said:
        found = held(loaded(tmp_path / "frozen", engine))
    assert_equal({name: found[name] for name in frozen}, frozen)
    for name in ("third.weight", "third.bias"):
        assert torch.equal(found[f"exact {name}"], frozen[name].float())
        assert not found[f"exp_avg {name}"].any() and not found[f"exp_avg_sq {name}"].any()
    assert any("begins anew: 'third.weight', 'third.bias'" in line for line in said)


def test_frozen_parameters_that_were_left_out(tmp_path: Path) -> None:
    engine_of(Small(frozen="third")).save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    refused(engine_of(Small()), tmp_path, "not in the checkpoint: 'third.weight', 'third.bias'")
    engine = engine_of(Small(frozen="third"))
    before = held(engine)["third.weight"]
    with listening(logging.INFO) as said:
        loaded(tmp_path, engine)
    assert torch.equal(held(engine)["third.weight"], before)
    assert sum("frozen and not saved, so as before: ['third.weight', 'third.bias']" in line for line in said) == 1


def test_states_that_were_deleted_to_save_room(tmp_path: Path) -> None:
    first = saved(tmp_path, engine_of(Small(), zero={"checkpoint": {"keep_optimizer": 1}}))
    source = held(first)
    saved(tmp_path, first, 1)
    engine, tag = engine_of(Small()), "global_step2"
    refused(
        engine, tmp_path, "zero.checkpoint.keep_optimizer", "load_optimizer_states=False loads the weights", tag=tag
    )
    found = held(loaded(tmp_path, engine, tag=tag, load_optimizer_states=False))
    assert torch.equal(found["exact first.weight"], source["exact first.weight"])
    assert not found["exp_avg first.weight"].any()


@pytest.mark.parametrize("place", ["none", "cpu"])
def test_weights_alone(tmp_path: Path, place: str) -> None:
    more = BF16 | {"zero_optimization": {"offload_optimizer": {"device": place}}}
    source = held(saved(tmp_path, engine_of(Small(), **more)))
    fresh = held(engine_of(Small(), **more))
    engine = engine_of(Small(), **more)
    train(engine, 3, first=5)
    for options, states, steps in (
        ({"load_module_only": True}, held(engine), 3),
        ({"load_optimizer_states": False}, fresh, 2),
    ):
        loaded(tmp_path, engine, **options)
        mine = {name: value for name, value in states.items() if name.startswith(("exp_avg", "exp_avg_sq", "step"))}
        assert_equal(held(engine), source | mine)
        assert engine.global_steps == steps


def test_masters_from_the_16_bit_weights(tmp_path: Path) -> None:
    source = held(saved(tmp_path, engine_of(Small(), **BF16)))
    for kind in (BF16, {}):
        engine = engine_of(Small(), zero_optimization={"load_from_fp32_weights": False}, **kind)
        found = held(loaded(tmp_path, engine))
        for name in ("first.weight", "second.bias"):
            assert torch.equal(found[f"exact {name}"], source[name].float())
            assert not torch.equal(found[f"exact {name}"], source[f"exact {name}"])
            assert torch.equal(found[f"exp_avg {name}"], source[f"exp_avg {name}"])


def test_a_function_that_loads(tmp_path: Path) -> None:
    source = held(saved(tmp_path, engine_of(Small(tied=True))))
    seen = {}

    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        seen.update(src)
        dst.load_state_dict({f"{name}": value for name, value in src.items() if "third" not in name}, strict=False)

    model = Small(tied=True)
    model.extra = nn.Linear(2, 2)
    engine = engine_of(model)
    engine.load_checkpoint(tmp_path, custom_load_fn=load)
    found = held(engine)
    assert seen.keys() == Small(tied=True).state_dict().keys()
    assert all(value.device.type == "cpu" for value in seen.values())
    assert torch.equal(seen["third.weight"], seen["first.weight"])
    assert torch.equal(found["exact first.weight"], source["exact first.weight"])
    assert torch.equal(found["exp_avg first.weight"], source["exp_avg first.weight"])
    assert torch.equal(found["buffer norm.running_mean"], source["buffer norm.running_mean"])


def test_offloaded_states_must_come_back_first(tmp_path: Path) -> None:
    engine = saved(tmp_path, engine_of(Small()))
    engine.offload_states()
    with pytest.raises(RuntimeError, match="reload_states"):
        engine.load_checkpoint(tmp_path)
    engine.reload_states()
    with zero.GatheredParameters(engine.module.first.weight), pytest.raises(RuntimeError, match="GatheredParameters"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("given", [None, "", 5])
def test_no_folder_is_given(given: Any) -> None:
    engine = engine_of(Small())
    with pytest.raises(ValueError, match=r"load_checkpoint\(\): load_dir must be a non-empty string"):
        engine.load_checkpoint(given)


def test_without_latest(tmp_path: Path) -> None:
    engine = engine_of(Small())
    with listening() as said:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    assert sum("has no file 'latest'" in line for line in said) == 1
    assert f"load_checkpoint: there is no folder {tmp_path / 'nowhere'}; nothing is loaded" in said


def other_saves(folder: Path) -> str:
    """Each rank has a `latest` of its own, as of folders that are not shared."""
    engine = engine_of(Small())
    engine.save_checkpoint(folder, tag="a")
    engine.save_checkpoint(folder, tag="b")
    before = held(engine)
    with pytest.raises(
        ValueError, match=r"the ranks would load different checkpoints: rank 0: 'a'.*rank 1: 'b'"
    ) as one:
        engine.load_checkpoint(folder, tag="ab"[dist.get_rank()])
    assert one.type is ValueError
    with pytest.raises(Damaged, match="no folder") as other:
        engine.load_checkpoint(folder, tag=("a", "gone")[dist.get_rank()])
    assert_equal(held(engine), before)
    engine.load_checkpoint(folder, tag="a")
    train(engine)
    engine.destroy()
    return f"{one.value}{other.value}"


def test_ranks_that_would_load_different_saves(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(2, other_saves, tmp_path)
    assert "rank 1: " in first
    assert "tag 'gone'" in second
