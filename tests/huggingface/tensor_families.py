"""Tiny models of every family of Transformers that has a tensor-parallel plan, cut over two ranks beside plain torch.

    python tests/huggingface/tensor_families.py [--write] [FAMILY ...]

with `tests` on PYTHONPATH says what each family gives: "equal", "refused", with zero's reason, or "plain", where plain
Transformers does not build or run it here; anything else is a fault. `--write` puts it in tensor_families.json.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from every_model import VOCABULARY, PlainCannot, _inputs, _said, _seed, config_of, families

TABLE = Path(__file__).with_name("tensor_families.json")
KINDS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "LMHeadModel", "")
CLOSE = 1e-6  # of the loss, and of the largest gradient
NEAR = 1e-3  # the same where numbers of 64 bits are as close as that
ROUNDED = 1e-4  # the same of models that do not compute in 64 bits
LARGEST = 10_000_000  # parameters
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "tensor_parallel": {"autotp_size": 2},
}
SIZES = (  # what fields of a configuration are set to, the first whose pattern is all of the name
    (r"(vocab_size|vocab_size_per_layer_input|.*_vocab_size)", VOCABULARY),
    (r"(moe|shared|expert|share).*(intermediate_size|hidden_size|dim)|moe_intermediate_size", 32),
    (r"(.*intermediate_size.*|(.*_)?ffn_(hidden_size|dim)|mlp_dim)", 96),
    (r"(num_hidden_layers|num_layers|.*encoder_layers|depth|n_layers|conf_num_hidden_layers|num_blocks)", 4),
    (r"(.*num_key_value_heads|kv_n_heads|.*_num_key_heads)", 2),
    (r"(.*num_attention_heads|num_heads|n_heads|.*_n_heads|.*num_value_heads|.*attention_heads|linear_num_heads)", 4),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim", 8),
    (r"(.*head_dim|d_head)", 16),
    (r".*(lora_rank|lowrank|_rank)", 16),
    (r"(n_group|n_groups|topk_group|moe_topk|num_nextn_predict_layers|.*mtp_layers)", 1),
    (r"(num_experts_per_tok|moe_k|moe_top_k|top_k_experts|index_topk_blocks)", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num)", 4),
    (r"(first_k_dense_replace|n_shared_experts|num_dense_layers|.*num_shared_experts)", 1),
    (r"(sliding_window|sliding_window_size|attention_chunk_size|index_topk|mamba_chunk_size|index_block_size)", 4),
    (r"(max_position_embeddings|max_seq_len|max_source_positions)", 64),
    (r"(image_size|crop_size|max_image_size|min_image_size)", 28),
    (r"(hidden_size|hidden_dim|d_model|embed_dim|n_embd|embedding_dim|.*_hidden_size|.*_hidden_dim)", 64),
    (r"(output_dim|projection_dim|adapter_.*_dim|.*_embed_dim|.*(in|out)put_dims?|output_proj_dims|.*_proj_dims)", 64),
)
MISSING = {
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}  # what has no default in some
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}


def _rotary(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


OWN: dict[str, dict[str, Any]] = {  # by types of configurations, what else they need
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "cosmos3_edge_text": _rotary(2, 3, 3),
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "ernie4_5_vl_moe_text": _rotary(3, 3, 2),
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "glm4v_text": _rotary(2, 3, 3),
    "glm4v_moe_text": _rotary(2, 1, 1),
    "glm_image_text": _rotary(2, 3, 3),
    "glm_ocr_text": _rotary(2, 3, 3),
    "glm5_next_text": {"index_kpool": 2},
    "granite4_vision": {"deepstack_layer_map": [[0, 1]]},
    "granitemoehybrid": _MIXED,
    "hunyuan_vl_text": _rotary(2, 2, 2, 2),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _MIXED,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"moe_topk": 2},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": _rotary(2, 3, 3),
    "qwen2_5_omni_text": _rotary(2, 3, 3),
    "qwen2_5_vl_text": _rotary(2, 3, 3),
    "qwen2_vl_text": _rotary(2, 3, 3),
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"sliding_window": 4},
}


def planned() -> list[str]:
    """All families with a plan: of a configuration, or one below it, or of a class."""
    return [
        family
        for family in sorted(families())
        if _plans(_default(family)) or any(getattr(kind, "_tp_plan", None) for kind in _kinds(family))
    ]


def classes(family: str) -> list[Any]:
    """The classes of a family, the one to be tried first in front; those of its text model alone come last."""
    config = _default(family)
    text = getattr(config, "get_text_config", lambda: config)()
    return [*_kinds(family), *(_kinds(text.model_type) if text is not config else ())]


def _kinds(family: str) -> list[Any]:
    import transformers

    kinds = []
    for name in families().get(family, ()):
        with contextlib.suppress(ImportError):  # of a library that is not here
            if hasattr(kind := getattr(transformers, name, None), "config_class"):
                kinds.append(kind)
    return sorted(kinds, key=lambda kind: next(at for at, end in enumerate(KINDS) if kind.__name__.endswith(end)))


def _default(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[family]()
    except Exception:  # Transformers itself does not build the default
        return None


def _plans(config: Any) -> bool:
    """Whether this configuration has a plan, or one of those below it."""
    below = [each for each in getattr(config, "__dict__", {}).values() if hasattr(each, "base_model_tp_plan")]
    return bool(getattr(config, "base_model_tp_plan", None)) or any(map(_plans, below))


def tiny(kind: Any) -> Any:
    """A configuration of this class: the defaults, with sizes that go together."""
    from transformers import PreTrainedConfig

    said: dict[str, Any] = {}
    plain = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    below = getattr(kind, "sub_configs", None) or {}
    example = kind() if below else None
    for name in below:
        if isinstance(sub := getattr(example, name, None), PreTrainedConfig):
            said[name] = tiny(type(sub)).to_dict()
    for field in dataclasses.fields(kind):
        value = field.default
        if field.name in {*said, *plain}:
            continue
        if field.name in MISSING and value is None:
            said[field.name] = MISSING[field.name]
        elif type(value) is int:
            said[field.name] = _size(field.name, value)
        elif re.search("drop|jitter", field.name) and type(value) is float:
            said[field.name] = 0.0
        elif field.name.endswith("_token_id") and isinstance(value, (tuple, list)):
            said[field.name] = VOCABULARY - 1
    if "kv_lora_rank" in said:
        said["num_key_value_heads"] = said["num_attention_heads"]
        said |= {"head_dim": said["qk_rope_head_dim"]} if "head_dim" in said else {}
    return kind(**said | OWN.get(kind.model_type, {}))


def _size(name: str, value: int) -> int:
    if name.endswith(("_id", "_token_index", "_token_ids")) or "_token_" in name:
        return value if value < VOCABULARY else VOCABULARY - 1 - sum(map(ord, name)) % 32
    return next((size for pattern, size in SIZES if value > 0 and re.fullmatch(pattern, name)), value)


def _configs(family: str, kind: Any) -> Iterator[Any]:
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[family]
    yield lambda: tiny(theirs if issubclass(theirs, kind.config_class) else kind.config_class)
    for divisor in (32, 16, 8):
        yield lambda divisor=divisor: config_of(family, divisor)


def built(family: str, kind: Any) -> tuple[Any, dict[str, Any]]:
    """A small model of a class, without dropout, and what its forward takes; raises PlainCannot."""
    why = ""
    for made in _configs(family, kind):
        try:
            config = made()
            with torch.device("meta"):
                count = sum(param.numel() for param in kind._from_config(copy.deepcopy(config)).parameters())
            if not 0 < count <= LARGEST:
                why = why or f"{count} parameters"
                continue
            _seed(0)
            model = kind._from_config(config).train()
        except Exception as error:
            why = why or _said(error)
            continue
        _no_dropout(model)
        for inputs in _inputs(model):
            try:
                loss = _loss(model, inputs)
                if loss.requires_grad and torch.equal(loss, _loss(model, inputs)):
                    loss.backward()
                    model.zero_grad()
                    return model, inputs
                why = f"a loss of {loss.item()}, or another each time"
            except Exception as error:
                why = why or _said(error)
    raise PlainCannot(why)


def _loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Its loss, or a weighted sum of what it gives otherwise: of what a norm gives the squares are the same."""
    _seed(2)
    given = model(**copy.deepcopy(inputs))
    if (loss := given.get("loss")) is not None and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    chance = torch.Generator().manual_seed(3)
    tensors = [each for each in given.values() if isinstance(each, torch.Tensor) and each.requires_grad]
    return torch.stack([(each * torch.randn(each.shape, generator=chance)).mean() for each in tensors]).sum()


def _no_dropout(model: Any) -> None:
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name or "jitter" in name or (name == "p" and isinstance(module, torch.nn.Dropout)):
                vars(module)[name] = 0.0 if isinstance(value, float) else value


def outcome(family: str) -> tuple[str, str, str]:
    """Class, what it gives and why; on both ranks."""
    torch.set_grad_enabled(True)
    said = []
    for kind in classes(family):
        try:
            model, inputs = built(family, kind)
        except PlainCannot as error:
            said.append((kind.__name__, "plain", str(error)))
            continue
        try:
            return (kind.__name__, *_cut(model, inputs))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames[-5:]))
            return kind.__name__, "fault", f"{_said(error)} [{at}]"
    return said[0] if said else ("", "plain", "no class")


def _cut(model: Any, inputs: dict[str, Any]) -> tuple[str, str]:
    import zero
    from zero.utils import safe_get_full_grad

    exact = copy.deepcopy(model)
    wanted_loss, wanted = _gradients(model, inputs)
    model.zero_grad()
    try:
        engine, *_ = zero.initialize(model=model, config=CONFIG)
    except ValueError as error:
        return "refused", str(error)
    try:
        loss = _loss(engine, inputs)
        engine.backward(loss)
        found = {name: safe_get_full_grad(param) for name, param in model.named_parameters() if name in wanted}
        engine.step()
        apart = _apart(loss.item(), found, wanted_loss, wanted)
        apart["the norm"] = abs(float(engine.get_global_grad_norm()) / _norm(wanted) - 1)
        worst, error = _worst(apart)
        if CLOSE < error < NEAR:
            exactly = _apart_in_64_bits(exact, inputs, engine._sharded.meshes)
            worst, error = (worst, error * CLOSE / ROUNDED) if exactly is None else _worst(exactly)
        return ("equal", "") if error <= CLOSE else ("fault", f"{worst} {error} apart")
    except RuntimeError as error:
        if not str(error).startswith("tensor_parallel: "):
            raise
        return "refused", str(error)
    finally:
        engine.destroy()


def _gradients(model: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients, which are kept by the model, too."""
    (loss := _loss(model, inputs)).backward()
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    zeros = {name: torch.zeros_like(param) for name, param in named.items() if param.grad is None}
    return loss.item(), zeros | {name: each.grad.clone() for name, each in named.items() if each.grad is not None}


def _worst(apart: dict[str, float]) -> tuple[str, float]:
    """What is most apart, on the rank where it is."""
    import torch.distributed as dist

    every: list[Any] = [None, None]
    dist.all_gather_object(every, max(apart.items(), key=lambda each: (math.isnan(each[1]), each[1])))
    return max(every, key=lambda each: each[1])


def _norm(grads: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


def _apart(loss: float, found: Any, wanted_loss: float, wanted: Any) -> dict[str, float]:
    """Errors of gradients, relative to the largest element; of tiny ones to that of all."""
    least = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values() if grad.numel())
    apart = {
        name: float((found[name] - grad).abs().max()) / max(float(grad.abs().max()), least)
        for name, grad in wanted.items()
        if grad.numel()
    }
    return apart | {"the loss": abs(loss - wanted_loss)}


def _apart_in_64_bits(model: Any, inputs: dict[str, Any], meshes: Any) -> dict[str, float] | None:
    """The same of layers that are cut without an engine, which has no such numbers; None where plain torch fails."""
    import torch.distributed as dist

    from zero.config.tensor_parallel import TensorParallel
    from zero.parallel.moves import assembled
    from zero.parallel.tensor.cutting import CutModel
    from zero.parallel.tensor.plan import tensor_plan

    section = TensorParallel(autotp_size=2)
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch has no grouped product of such numbers
    try:
        wanted = _gradients(model.double(), inputs)
    except RuntimeError:
        return None
    model.zero_grad()
    plan = tensor_plan(model, section, dist.get_rank(), 2)
    cut = CutModel(model, plan, meshes, section, {})
    loss, found = _gradients(model, inputs)
    for name in found.keys() & plan.places.keys():
        if (place := plan.places[name]).axes.sums:
            dist.all_reduce(found[name])
        if place.cut is not None:
            found[name] = assembled(found[name], cut.axis, place.dim, place.ranges)
    return _apart(loss, found, *wanted)


def outcomes(tried: list[str]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Families, and what each gives."""
    from ranks import Pool, RankError

    pool = Pool(2)
    for family in tried:
        try:
            first, second = pool.run(2, outcome, family)
            yield family, first if first == second else (first[0], "fault", f"ranks differ: {first}, {second}")
        except RankError as error:
            yield family, ("", "fault", str(error).strip().splitlines()[-1])
    pool.close()


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--write"]
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for family, said in outcomes(asked or planned()):
        print(family, *said, flush=True)
        table[family] = [*said[:2], said[2][:150]]
        if "--write" in sys.argv:
            rows = (f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
            TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
