"""The promise: adapters of PEFT train on a frozen base at every stage as in plain torch, and their files are PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import (
    LAYERS,
    PARTS,
    STEPS,
    differing,
    differing_of,
    engine_of,
    llama,
    lora,
    loss_of,
    nbytes,
    plain,
    sent,
    train,
    trained_params,
    whole,
    with_lora,
)
from marks import needs
from safetensors.torch import load_file

import zero

pytestmark = [pytest.mark.ranks(2), pytest.mark.long, needs("peft")]


def check_stages(dtype: torch.dtype) -> None:
    base, world = llama(dtype), dist.get_world_size()
    losses, wanted = plain(with_lora(llama(dtype)))
    assert losses[0] != losses[PARTS]
    whole_base, of_adapters = nbytes(base.parameters()), nbytes(trained_params(wanted))
    for stage in range(4):
        engine = engine_of(with_lora(llama(dtype)), stage)
        mine = train(engine)
        assert mine == {number: losses[number] for number in mine}
        traffic, alive = sent(engine), engine.state_nbytes()
        assert alive.optimizer < 4 * of_adapters, "nothing is kept of the base beside its values"
        if world > 1:
            assert 0 < traffic["reduce"][1] < whole_base, "nothing is reduced of the base"
            cut = stage == 3
            assert (traffic.get("gather", (0, 0))[1] > 2 * whole_base) == cut, "only what is cut is gathered"
            assert (alive.parameters < 0.7 * (whole_base + of_adapters)) == cut
            turns = STEPS * PARTS // world * 2  # forward and backward
            limit = turns * (whole_base + of_adapters) / 2 + 1024 * turns
            assert traffic.get("gather", (0, 0))[1] < limit, "the base travels in its own format"
        kept = whole(engine.module)
        for name, value in base.state_dict().items():
            within = f"base_model.model.{name}"
            within = within if within in kept else within.replace(".weight", ".base_layer.weight")
            assert kept[within].equal(value), "the base's bytes are what they were"
        engine.destroy()
        assert differing(engine.module, wanted) == [], f"stage {stage}"


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float16)])
def test_every_stage_is_plain_peft_bit_by_bit(pool: Any, world: int, dtype: torch.dtype) -> None:
    pool.run(world, check_stages, dtype)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_are_those_of_peft(stage: int, tmp_path: Path) -> None:
    """Only adapters are gathered for them; PEFT reads them, and an engine takes them back."""
    import peft

    engine = engine_of(with_lora(llama()), stage)
    train(engine)
    before = sent(engine).get("gather", (0, 0))
    engine.save_pretrained(tmp_path)
    count, size = (now - then for now, then in zip(sent(engine).get("gather", (0, 0)), before, strict=True))
    assert count > 0 or stage < 3
    assert size < nbytes(llama().parameters()) / 2, "none of the base"
    dist.barrier()
    values = whole(engine.module)
    read = peft.PeftModel.from_pretrained(llama(), tmp_path)
    assert differing(engine.module, read) == []
    file = load_file(tmp_path / "adapter_model.safetensors")
    assert len(file) == sum("lora_" in name for name in values) == 4 * LAYERS
    other = engine_of(with_lora(llama()), stage)
    with zero.GatheredParameters(trained_params(other.module), modifier_rank=0):
        peft.set_peft_model_state_dict(other.module, peft.load_peft_weights(str(tmp_path), device="cpu"))
    assert differing(other.module, read) == []
    for made in (engine, other):
        made.destroy()
    model = llama()
    model.add_adapter(lora())
    engine = engine_of(model, stage)
    train(engine, 1)
    engine.save_pretrained(tmp_path / "own")
    values = {f"base_model.model.{name}": value for name, value in whole(model).items()}
    engine.destroy()
    dist.barrier()
    assert (
        differing_of(values, peft.PeftModel.from_pretrained(llama(), tmp_path / "own", autocast_adapter_dtype=False))
        == []
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_resumes_from_a_checkpoint_without_the_base(stage: int, tmp_path: Path) -> None:
    losses, wanted = plain(with_lora(llama()))
    engine = engine_of(with_lora(llama()), stage)
    train(engine, 1)
    before = sent(engine).get("gather", (0, 0))
    engine.save_checkpoint(tmp_path, tag="one", exclude_frozen_parameters=True)
    # What the step has left in flight is noted when it has come; at stage 3 nothing was.
    assert sent(engine).get("gather", (0, 0))[1] - before[1] <= (stage < 3) * nbytes(trained_params(engine.module))
    engine.destroy()
    dist.barrier()
    keys = [key for path in tmp_path.rglob("*.safetensors") for key in load_file(path)]
    assert keys
    assert [key for key in keys if ".lora_" not in key and not key.startswith("rank_state/")] == []
    other = engine_of(with_lora(llama(), init_lora_weights=False), stage)
    other.load_checkpoint(tmp_path, tag="one")
    mine = train(other, STEPS - 1, 1)
    other.destroy()
    assert mine == {number: losses[number] for number in mine}
    assert differing(other.module, wanted) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_over_a_frozen_base(reentrant: bool) -> None:
    losses, wanted = plain(with_lora(llama()), 2)
    for stage in (2, 3):
        model = with_lora(llama())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        engine = engine_of(model, stage)
        mine = train(engine, 2)
        assert mine == {key: losses[key] for key in mine}
        engine.destroy()
        assert differing(engine.module, wanted) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_the_base_answers_while_adapters_are_off(stage: int) -> None:
    """As of a reference model, between the steps and between forward and backward."""
    losses, wanted = plain(with_lora(llama()), 2)
    engine, base = engine_of(with_lora(llama()), stage), llama()
    mine = train(engine, 1)
    for number in range(PARTS + dist.get_rank(), 2 * PARTS, 2):
        loss = loss_of(engine, number)
        with torch.no_grad(), engine.module.disable_adapter():
            assert loss_of(engine, number).equal(loss_of(base, number))
        engine.backward(loss)
        engine.step()
        mine[number] = loss.item()
    engine.destroy()
    assert mine == {number: losses[number] for number in mine}
    assert differing(engine.module, wanted) == []


def test_another_adapter_between_steps() -> None:
    """What was frozen at the start is not trained in silence; what needs a gradient from the start is."""
    for stage in (1, 3):
        model = with_lora(llama())
        model.add_adapter("other", lora())
        engine = engine_of(model, stage)
        train(engine, 1)
        engine.module.set_adapter("other")
        with pytest.raises(RuntimeError, match=r"lora_A.default.weight' .*requires_grad was True at initialize\(\)"):
            train(engine, 1, 1)
        engine.destroy()


@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_of_either_dtype_have_exact_masters(autocast: bool) -> None:
    """With the section bf16 all compute in bf16, whichever PEFT has made; stages agree bit by bit."""
    import peft

    found = []
    for stage in range(4):
        torch.manual_seed(1)
        model = peft.get_peft_model(llama(), lora(), autocast_adapter_dtype=autocast)
        engine = engine_of(model, stage, bf16={"enabled": True})
        assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
        losses = train(engine)
        found.append((losses, whole(engine.module)))
        engine.destroy()
    assert all(losses == found[0][0] for losses, _ in found)
    for _, values in found:
        assert all(value.equal(found[0][1][name]) for name, value in values.items())
