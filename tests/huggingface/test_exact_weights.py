"""The promise: behind a door DeepSpeed's functions, and its script, give the exact weights of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import filled, opened
from ranks import Pool

from zero.launch.as_deepspeed import SITE


def functions(folder: str, number: int) -> None:
    """Train in bf16 and save; then the exact weights by each function, into a plain module and the engine's."""
    with opened():
        import deepspeed
        from deepspeed.utils.zero_to_fp32 import (
            convert_zero_checkpoint_to_fp32_state_dict,
            get_fp32_state_dict_from_zero_checkpoint,
            load_state_dict_from_zero_checkpoint,
        )
        from safetensors.torch import load_file

        def make() -> torch.nn.Module:
            net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 8, bias=False))
            net[2].weight = net[0].weight
            return net

        config = {**filled(number), "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        engine, *_ = deepspeed.initialize(model=make(), config=config)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        exact = {
            name: deepspeed.utils.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()
        }
        engine.save_checkpoint(folder, tag="two")

        state = get_fp32_state_dict_from_zero_checkpoint(folder)
        assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(state, torch.float32)
        assert state["2.weight"] is state["0.weight"]
        assert all(torch.equal(state[name], value) for name, value in exact.items())
        assert any(not torch.equal(value, value.bfloat16().float()) for value in exact.values())
        plain = load_state_dict_from_zero_checkpoint(make(), folder, tag="two")
        assert all(torch.equal(plain.get_parameter(name), value) for name, value in exact.items())

        for param in engine.module.parameters():
            with deepspeed.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
                param.zero_()
        load_state_dict_from_zero_checkpoint(engine.module, folder)
        found = {
            name: deepspeed.utils.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()
        }
        assert all(torch.equal(found[name], value.bfloat16().float()) for name, value in exact.items())
        with pytest.raises(ValueError, match="give it to engine"):
            get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
        if engine.global_rank == 0:
            convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/fp32", tag="two")
            written = load_file(f"{folder}/fp32/model.safetensors")
            assert all(torch.equal(written[name], value) for name, value in exact.items())
        engine.destroy()


@pytest.mark.parametrize("number", [3, pytest.param(1, marks=pytest.mark.long)])
def test_the_functions_give_the_exact_weights(door: Pool, tmp_path: Path, number: int) -> None:
    door.run(2, functions, str(tmp_path), number)
    words = [str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "by script.safetensors"), "-t", "two"]
    environment: dict[str, Any] = {"PYTHONPATH": str(Path(SITE).parents[2])}
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    from safetensors.torch import load_file

    one, other = load_file(tmp_path / "by script.safetensors"), load_file(tmp_path / "fp32" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
