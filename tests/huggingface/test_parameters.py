"""The promise: programs for DeepSpeed find parameters under stage 3, and weights of checkpoints, where they look."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import filled, opened, settings
from ranks import Pool, listening

import zero


def pretrained(model: str, config: dict[str, Any]) -> Any:
    """A model that Transformers loads where the JSON says what stage 3 is."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    said = HfDeepSpeedConfig(config)
    try:
        return AutoModelForCausalLM.from_pretrained(model)
    finally:
        del said


def loaded_dtypes(model: str, as_built: bool) -> tuple[set[str], bool]:
    """The dtypes of parameters that were loaded, and whether all of them are those of the file, rounded."""
    import os

    from safetensors.torch import load_file

    with opened():
        os.environ["ZERO_INIT_AS_BUILT"] = "1" if as_built else "0"
        made = pretrained(model, {**filled(3), "bf16": {"enabled": True}})
        file = load_file(f"{model}/model.safetensors")
        with zero.GatheredParameters(made.parameters()):
            same = [torch.equal(param, file[name].to(param.dtype)) for name, param in made.named_parameters()]
        return {str(param.dtype) for param in made.parameters()}, all(same)


def test_pretrained_weights_arrive_in_the_dtype_of_the_json(door: Pool, tiny: Path) -> None:
    assert door.run(2, loaded_dtypes, str(tiny), False) == [({"torch.bfloat16"}, True)] * 2
    assert door.run(2, loaded_dtypes, str(tiny), True) == [({"torch.float32"}, True)] * 2


def hash_module(module: torch.nn.Module) -> list[torch.Tensor]:
    """As TRL's function of this name reads a model, so that a file of what it has computed is named by it."""
    found = []
    for _, tensor in sorted(module.state_dict().items()):
        found.append(tensor.cpu())
    return found


def hashed(model: str, stage: int) -> bool:
    """Whether it reads the values of the file, before there is an engine and with one; others are refused."""
    from safetensors.torch import load_file

    with opened():
        import deepspeed

        file = sorted(load_file(f"{model}/model.safetensors").items())
        made = pretrained(model, filled(stage))
        found = [hash_module(made)]
        engine, *_ = deepspeed.initialize(model=made, config=filled(stage))
        found.append(hash_module(made))
        if stage == 3:
            with pytest.raises(RuntimeError, match="was released when"):
                [each.cpu() for each in made.state_dict().values()]
        engine.destroy()
        names = sorted(made.state_dict())
    return all(torch.equal(found[0][names.index(name)], each) for name, each in file) and all(map(torch.equal, *found))


def test_a_file_is_named_by_the_values_of_a_cut_model(door: Pool, tiny: Path) -> None:
    assert door.run(2, hashed, str(tiny), 3) == [True, True]


def saved(path: str) -> list[str]:
    """What is said where rank 0 saves a cut model, and where the file is loaded."""
    with opened():
        import deepspeed

        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=filled(3))
        with listening() as said:
            if engine.global_rank == 0:
                torch.save(engine.module.state_dict(), path)
                with pytest.raises(RuntimeError, match=r"no values of parameter '(weight|bias)'"):
                    torch.load(path, weights_only=False)
        engine.destroy()
        return said


def test_a_program_may_save_a_cut_model_but_nobody_loads_nothing(door: Pool, tmp_path: Path) -> None:
    first, second = door.run(2, saved, str(tmp_path / "saved.bin"))
    assert len(first) == 1 and "the file has no values and cannot be loaded" in first[0] and second == []


def drawn_without(name: str) -> list[str]:
    """Names of parameters that differ from a plain model's of the same seed, where Transformers has no such module."""
    import copy

    with opened(), pytest.MonkeyPatch.context() as patch:
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        patch.delitem(sys.modules, name)
        sizes = {"num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        small = LlamaConfig(hidden_size=16, intermediate_size=16, **sizes)
        torch.manual_seed(0)
        plain = LlamaForCausalLM(copy.deepcopy(small))
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=filled(3)):
            cut = LlamaForCausalLM(small)
        with zero.GatheredParameters(cut.parameters()):
            pairs = zip(cut.named_parameters(), plain.parameters(), strict=True)
            return [name for (name, param), other in pairs if not torch.equal(param, other)]


def test_transformers_4_builds_cut_models(door: Pool) -> None:
    """It has no module `initialization`, and suppresses nothing."""
    assert door.run(2, drawn_without, "transformers.initialization") == [[]] * 2


def saved_by_sentence_transformers(folder: str) -> list[bool]:
    """Whether its trainer on rank 0, and its model on all ranks, save whole weights and what these compute for a card.

    The library itself is in `make programs`; here are the two methods that are asked, as it has them.
    """
    from types import ModuleType, SimpleNamespace

    from safetensors.torch import load_file, save_file

    class BaseModel(torch.nn.Sequential):
        def save(self, path: str) -> None:
            save_file({**self.state_dict(), "card": self(torch.ones(1, 4)).detach()}, path)

    class BaseTrainer(SimpleNamespace):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            self.model.save(output_dir)

    with opened(), pytest.MonkeyPatch.context() as patch:
        import deepspeed

        for kind in (BaseModel, BaseTrainer):
            module = ModuleType(f"sentence_transformers.base.{kind.__name__.removeprefix('Base').lower()}")
            setattr(module, kind.__name__, kind)
            patch.setitem(sys.modules, module.__name__, module)
        torch.manual_seed(0)
        plain = BaseModel(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
        wanted = {
            **{name: value.clone() for name, value in plain.state_dict().items()},
            "card": plain(torch.ones(1, 4)),
        }
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=plain, optimizer=optimizer, config=filled(3))
        state = engine._zero3_consolidated_16bit_state_dict()
        if engine.global_rank == 0:
            BaseTrainer(model=plain)._save(f"{folder}/trainer", state)
        plain.save(f"{folder}/model")
        assert engine(torch.ones(1, 4)).equal(wanted["card"])
        engine.destroy()
        found = map(load_file, (f"{folder}/trainer", f"{folder}/model") if engine.global_rank == 0 else ())
        return [all(each[name].equal(value) for name, value in wanted.items()) for each in found]


def test_sentence_transformers_saves_whole_weights(door: Pool, tmp_path: Path) -> None:
    assert door.run(2, saved_by_sentence_transformers, str(tmp_path)) == [[True, True], []]


def names_of_parameters(number: int) -> list[Any]:
    """What `ds_...` say of one parameter: outside of, and inside of a gathering."""
    with opened():
        import deepspeed
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        model = torch.nn.Linear(4, 3)
        config = filled(number, offload_param={"device": "cpu"})  # which has no meaning below stage 3
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        weight = engine.module.weight
        there = [name for name in ("ds_id", "ds_shape", "ds_status", "partition_numel") if hasattr(weight, name)]
        said: list[Any] = [there]
        if there:
            said += [tuple(weight.ds_shape), weight.ds_numel, weight.partition_numel(), weight.ds_persist]
            with pytest.raises(AttributeError, match=r"all_gather .* is not in zero.*GatheredParameters"):
                weight.all_gather  # noqa: B018
            said += [weight.ds_status is ZeroParamStatus.NOT_AVAILABLE]
            with deepspeed.zero.GatheredParameters(weight):
                said += [weight.ds_status is ZeroParamStatus.AVAILABLE]
            offload = engine.optimizer.parameter_offload
            assert [*offload.module.named_parameters(), *offload.module.ds_external_parameters()] == []
            offload._register_deepspeed_module(offload.module)
        said.append(hasattr(torch.nn.Linear(2, 2).weight, "ds_id"))
        engine.destroy()
        return said


def test_cut_parameters_have_the_names_of_deepspeed_and_others_have_not(door: Pool) -> None:
    names = ["ds_id", "ds_shape", "ds_status", "partition_numel"]
    assert door.run(2, names_of_parameters, 3)[0] == [names, (3, 4), 12, 6, False, True, True, False]
    assert door.run(2, names_of_parameters, 2)[0] == [[], False]


def shards(building: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`ds_tensor` of each parameter of this rank, and the whole parameters after writing to it."""
    with opened():
        import deepspeed

        config = {**filled(3), "bf16": {"enabled": dtype is torch.bfloat16}}
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=building):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3))
        if not building:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        kept = [param.ds_tensor.clone() for param in model.parameters()]
        for param in model.parameters():
            param.ds_tensor.fill_(7)
            param.ds_tensor.data = torch.zeros(1)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            whole = [param.detach().clone() for param in model.parameters()]
        if not building:
            engine.destroy()
        return kept, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("building", [False, True])
def test_the_own_shard_of_a_parameter_is_there_and_writing_to_it_changes_nothing(
    door: Pool, building: bool, dtype: torch.dtype
) -> None:
    (first, whole), (second, again) = door.run(2, shards, building, dtype)
    for one, other, param, same in zip(first, second, whole, again, strict=True):
        assert one.dtype == param.dtype == dtype
        assert torch.equal(torch.cat([one, other])[: param.numel()], param.flatten())
        assert torch.equal(param, same)


def lost_writes(strict: bool) -> str:
    """What a write inside a gathering that takes none says, where the JSON has `enable_sanity_checks`."""
    with opened():
        import deepspeed

        model, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, other)]
        engines = [
            deepspeed.initialize(model=net, optimizer=optimizer, config=filled(3, enable_sanity_checks=checked))[0]
            for net, optimizer, checked in zip((model, other), optimizers, (strict, not strict), strict=True)
        ]
        try:
            with deepspeed.zero.GatheredParameters(model.weight), torch.no_grad():
                model.weight.add_(1)
        except RuntimeError as error:
            return str(error)
        finally:
            for engine in engines:
                engine.destroy()
        return ""


def test_sanity_checks_make_a_lost_write_an_error(door: Pool) -> None:
    assert all(
        "changed inside GatheredParameters without modifier_rank" in said for said in door.run(2, lost_writes, True)
    )
    assert door.run(2, lost_writes, False) == ["", ""]


def merged(model: str, number: int) -> list[Any]:
    """Whether merging an adapter is seen inside a gathering, is gone after it, and what is said of a lost change."""
    with opened(), listening() as said:
        import deepspeed
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        net = get_peft_model(pretrained(model, settings(number)), lora)
        trained = [param for param in net.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(trained, 0.1), config=filled(number))
        layer = net.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
        gathered = deepspeed.zero.GatheredParameters
        with gathered(net.parameters()):
            before = layer.detach().clone()
            net.merge_adapter()
            seen = not torch.equal(before, layer)
            net.unmerge_adapter()
        for _ in range(2):
            with gathered(layer), torch.no_grad():
                layer.add_(1)
        with gathered(net.parameters()):
            left = torch.equal(layer, before)
        engine.destroy()
        return [seen, left, sum("changed inside GatheredParameters" in text for text in said)]


def test_an_adapter_is_merged_inside_and_a_lost_change_is_said_once(door: Pool, tiny: Path) -> None:
    assert door.run(2, merged, str(tiny), 3) == [[True, True, 1], [True, True, 0]]


def reference(model: str) -> list[Any]:
    """A model of which nothing is trained, with the JSON of one that is."""
    with opened():
        import deepspeed

        net = pretrained(model, settings(3))
        net.requires_grad_(False)
        optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
        odd = {"checkpoint": {"use_node_local_storage": True}}
        engine, used, *_ = deepspeed.initialize(model=net, config={**filled(3), **optimizer, **odd})
        ids = torch.tensor([[3, 4, 5]])
        logits = engine(ids).logits.sum().item()
        engine.destroy()
        return [used, isinstance(engine, deepspeed.DeepSpeedEngine), logits == net(ids).logits.sum().item()]


def test_a_model_of_which_nothing_is_trained_needs_no_optimizer(door: Pool, tiny: Path) -> None:
    assert door.run(2, reference, str(tiny)) == [[None, True, True]] * 2


def experts(out: str) -> None:
    """Save a mixture of experts, whose weights are split for it, as scripts do: all ranks call, rank 0 has weights."""
    with opened():
        import deepspeed
        from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        few = {"num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts": 4, "vocab_size": 32}
        net = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **few, shared_expert_intermediate_size=8))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=filled(3))
        weights = engine._zero3_consolidated_16bit_state_dict()
        main = torch.distributed.get_rank() == 0
        net.save_pretrained(f"{out}/{int(not main)}", is_main_process=main, state_dict=weights)
        engine.destroy()
        if main:
            again = Qwen2MoeForCausalLM.from_pretrained(f"{out}/0")
            assert all(map(torch.equal, again.state_dict().values(), net.state_dict().values()))


def test_a_mixture_of_experts_is_saved_though_other_ranks_have_no_weights(door: Pool, tmp_path: Path) -> None:
    door.run(2, experts, str(tmp_path))
    assert (tmp_path / "0" / "model.safetensors").exists()
    assert not (tmp_path / "1" / "model.safetensors").exists()


def initialized(folder: str) -> list[Any]:
    """Weights that a model draws, or writes far below itself, or by a view of a row: plain ones, then at stage 3."""
    with opened():
        from transformers import PreTrainedConfig, PreTrainedModel, initialization
        from transformers.integrations import HfDeepSpeedConfig

        class Own(PreTrainedModel):
            config_class = PreTrainedConfig
            __module__ = "transformers.models.own"  # others are initialized by other rules

            def __init__(self, config: Any) -> None:
                super().__init__(config)
                self.blocks = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)))
                self.words = torch.nn.Embedding(3, 2)
                self.drawn = torch.nn.Linear(2, 2)  # torch draws first, and Transformers after it
                self.post_init()

            def _init_weights(self, module: torch.nn.Module) -> None:
                if module is self.drawn:
                    initialization.normal_(module.weight)
                if module is self:
                    initialization.constant_(self.blocks[0][0].weight, 3)
                    initialization.constant_(self.words.weight, 2)
                    initialization.zeros_(self.words.weight[1])

        def built() -> Own:
            torch.manual_seed(0)
            return Own._from_config(PreTrainedConfig())

        plain = built()
        torch.nn.init.constant_(plain.words.weight, 5)
        plain.save_pretrained(folder)  # writes on rank 0 only
        torch.distributed.barrier()
        made = [built(), Own.from_pretrained(folder)]
        said = HfDeepSpeedConfig(filled(3))
        made += [built(), Own.from_pretrained(folder)]
        del said
        with zero.GatheredParameters([param for each in made for param in each.parameters()]):
            return [[param.tolist() for param in each.parameters()] for each in made]


def test_transformers_initializes_what_is_cut_as_what_is_not(door: Pool, tmp_path: Path) -> None:
    for built, loaded, cut, loaded_cut in door.run(2, initialized, str(tmp_path)):
        assert (cut, loaded_cut) == (built, loaded)
        assert built[0] == [[3, 3], [3, 3]]
