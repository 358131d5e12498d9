"""The promise: checkpoints of DeepSpeed's ZeRO 1, 2 and 3 become checkpoints of zero, exactly, and run no code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed_files
import pytest
import torch
import torch.distributed as dist
from deepspeed_files import Run
from models import TiedNet, config
from safetensors.torch import load_file

import zero
from zero.__main__ import main
from zero.checkpoint.index import Damaged
from zero.checkpoint.torch_file import Refused, load
from zero.checkpoint.verify import verify
from zero.compat.deepspeed_files import open_files
from zero.compat.import_deepspeed import import_deepspeed
from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

KEYS = ("exp_avg", "exp_avg_sq")


def groups_of(model: TiedNet) -> list[list[str]]:
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [[name for name, param in trained if (param.ndim > 1) == wide] for wide in (True, False)]


def run_of(dtype: torch.dtype = torch.float32, **more: Any) -> Run:
    """A run of the model of another test: tied, frozen, buffers, two groups, random states."""
    torch.manual_seed(11)
    model = TiedNet()
    named = dict(model.named_parameters())
    groups = groups_of(model)
    masters = {name: torch.randn_like(named[name]) for names in groups for name in names}
    states = {key: {name: torch.rand_like(value) for name, value in masters.items()} for key in KEYS}
    frozen = {name: value.detach().to(dtype).float() for name, value in named.items() if not value.requires_grad}
    buffers = {"scale": torch.tensor([3.0, 5.0])}
    tied = {"head.weight": "embed.weight"}
    return Run(groups, masters, states, frozen, buffers, tied, dtype, **more)


def loaded(folder: str, stage: int, dtype: str) -> dict[str, torch.Tensor]:
    """What an engine of this world size and stage has after loading."""
    model = TiedNet()
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in names]} for names in groups_of(model)]
    settings = config(stage, dist.get_world_size(), bf16={"enabled": dtype == "bf16"})
    engine = zero.initialize(model=model, model_parameters=groups, config=settings)[0]
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.global_steps == 3
    found = {f"weight/{name}": value.clone() for name, value in engine.module_state_dict().items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"master/{name}"] = safe_get_full_fp32_param(param)
            found |= {f"{key}/{name}": safe_get_full_optimizer_state(param, key) for key in KEYS}
            assert safe_get_full_optimizer_state(param, "step") == 3
    engine.destroy()
    return found if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("stage", "world", "padding", "dtype", "into"),
    [
        (1, 1, 0, "fp32", ((1, 3),)),
        (1, 3, 0, "bf16", ((2, 3), (1, 0))),
        (2, 2, 0, "fp32", ((2, 1), (1, 2))),
        (2, 3, 2, "bf16", ((2, 2),)),
        (3, 2, 0, "bf16", ((2, 3),)),
        (3, 3, 0, "fp32", ((2, 0), (1, 3))),
    ],
)
def test_everything_arrives(pool, stage, world, padding, dtype, into, tmp_path, capsys):
    run = run_of(torch.bfloat16 if dtype == "bf16" else torch.float32, client={"epoch": 4, "odd": torch.ones(2)})
    deepspeed_files.write(tmp_path / "theirs", run, stage, world, padding)
    assert main(["import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert "not taken: 'odd' of client_state" in capsys.readouterr().out
    assert verify(tmp_path / "ours" / "global_step3") == []
    for ranks, other in into:
        found = pool.run(ranks, loaded, str(tmp_path / "ours"), other, dtype)[0]
        for name, value in run.masters.items():
            assert torch.equal(found[f"master/{name}"], value), name
            assert torch.equal(found[f"weight/{name}"], value.to(run.dtype)), name
            assert all(torch.equal(found[f"{key}/{name}"], run.states[key][name]) for key in KEYS), name
        for name, value in run.frozen.items():
            assert torch.equal(found[f"weight/{name}"], value.to(run.dtype)), name
        assert torch.equal(found["weight/scale"], run.buffers["scale"])


def test_the_model_comes_out_as_the_masters_say(tmp_path):
    run = run_of(torch.bfloat16)
    theirs = deepspeed_files.write(tmp_path / "theirs", run, 3, 3)
    assert main(["import-deepspeed", str(theirs), str(tmp_path / "ours")]) == 0
    assert main(["consolidate", str(tmp_path / "ours"), str(tmp_path / "model.safetensors")]) == 0
    found = load_file(tmp_path / "model.safetensors")
    wanted = {**run.masters, **run.frozen, **run.buffers}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Bomb:
    """Pickled, it is an instruction to run a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


class Maker(Bomb):
    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.mark)!r}, 'w')",)


@pytest.mark.parametrize(("kind", "named"), [(Bomb, "posix.system"), (Maker, "eval")])
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_a_file_that_runs_code_is_refused_and_has_not_run(kind, named, where, tmp_path, capsys):
    mark = tmp_path / "it ran".replace(" ", "_")
    run = run_of(client={"note": kind(mark)} if where == "model" else {})
    tag = deepspeed_files.write(tmp_path / "theirs", run, 2, 2)
    if where == "optimizer":
        path = next(tag.glob("*rank_1*optim_states.pt"))
        torch.save({"optimizer_state_dict": kind(mark)}, path)
    assert main(["import-deepspeed", str(tag), str(tmp_path / "ours")]) == 1
    said = capsys.readouterr().err
    assert named in said
    assert "refused" in said
    assert not mark.exists()
    assert not (tmp_path / "ours").exists()
    torch.load(path if where == "optimizer" else tag / "mp_rank_00_model_states.pt", weights_only=False)
    assert mark.exists(), "the file would have run code"


def test_other_objects_are_refused_by_name(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    tag = deepspeed_files.write(tmp_path / "theirs", run_of(client={"run": Path("a")}), 1, 1)
    with pytest.raises(Refused, match=r"holds an object of pathlib\.\S*Path"):
        import_deepspeed(tag, tmp_path / "ours")
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(Refused, match=r"is not a whole file of torch\.save"):
        open_files(tag)
    assert set(torch.serialization.get_safe_globals()) == before, "what is allowed here is allowed nowhere else"
    with pytest.raises(FileNotFoundError):
        load(tag / "nothing.pt")


def test_incomplete_and_foreign_layouts_are_refused(tmp_path):
    run = run_of()
    tag = deepspeed_files.write(tmp_path / "three", run, 3, 3)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(Damaged, match=r"optimizer files of ranks \[1\] are missing"):
        import_deepspeed(tag, tmp_path / "ours")
    tag = deepspeed_files.write(tmp_path / "two", run, 2, 2)
    path = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with deepspeed_files.named():
        state = torch.load(path, weights_only=False)
        inner = state["optimizer_state_dict"]
        inner["single_partition_of_fp32_groups"][1] = inner["single_partition_of_fp32_groups"][1][:-7]
        torch.save(state, path)
    with pytest.raises(Damaged, match="flat tensor 1 of rank 1 has"):
        import_deepspeed(tag, tmp_path / "ours")
    for key, text in (("zero_stage", "BF16_Optimizer"), ("partition_count", "KeyError: 'partition_count'")):
        first = tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        with deepspeed_files.named():
            state = torch.load(first, weights_only=False)
            del state["optimizer_state_dict"][key]
            torch.save(state, first)
        with pytest.raises(ValueError, match=text):
            import_deepspeed(tag, tmp_path / "ours")
    (tag / "layer_3_expert_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(ValueError, match="pipelines and of experts"):
        import_deepspeed(tag, tmp_path / "ours")
    with pytest.raises(ValueError, match="no checkpoint of ZeRO"):
        import_deepspeed(tmp_path, tmp_path / "ours")
    good = deepspeed_files.write(tmp_path / "good", run, 1, 2)
    with pytest.raises(ValueError, match="is not empty"):
        import_deepspeed(good, tmp_path / "good")
    assert not (tmp_path / "ours").exists()
