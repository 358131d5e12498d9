"""Tiny models of every family of Transformers, made from its configuration classes, and what one training step does."""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import math
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_cases import filled, opened

VOCABULARY, LARGEST, SIDE, LENGTH = 128, 3_000_000, 64, 8  # tokens, parameters, pixels, tokens of a sample
_COUNTS = re.compile(r"layers?$|^depths?$|num_blocks|layer_num|stacks$|num_stages$|n_layer$")
_SIZES = re.compile(
    r"(hidden|intermediate|bottleneck|embed|ffn|inner|proj|head|lora|conv|channels|filter|d_model|d_ff|d_kv|n_embd|state|rank|"
    r"width|units|feature|codebook_dim|query_dim|out|dim)"
)
_KEPT = re.compile(r"num_channels|in_channels|head(s|)$|n_head|groups|_id|act|kernel|stride|ratio|length|state_machine")
_OF_LAYERS = {"layer_types", "mlp_layer_types", "block_types", "layers_block_type"}


class PlainCannot(Exception):
    """Plain Transformers does not build or run a class with the configuration that is made for it here."""


def families() -> dict[str, list[str]]:
    """The model classes of each family that one of the auto classes knows, by name."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for key, mapping in vars(modeling_auto).items():
        if key.startswith("MODEL") and key.endswith("_MAPPING_NAMES"):
            for family, names in mapping.items():
                classes = found.setdefault(family, [])
                classes += [name for name in ([names] if isinstance(names, str) else names) if name not in classes]
    return found


def config_of(family: str, divisor: int) -> Any:
    """Its default configuration with every width divided by `divisor`, so that what must divide another still does."""
    from transformers import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[family](), divisor)


def _shrunk(config: Any, divisor: int) -> Any:
    from transformers import PreTrainedConfig

    said: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        now = getattr(config, name, value)
        if isinstance(now, PreTrainedConfig):
            said[name] = _shrunk(now, divisor).to_dict()
        elif name not in ("model_type", "transformers_version", "architectures", "dtype"):
            said[name] = _smaller(name, value, divisor)
    for name in _OF_LAYERS & said.keys():
        said[name] = said[name][:2] if isinstance(said[name], list) else said[name]
    return type(config)(**said)


def _smaller(name: str, value: Any, divisor: int) -> Any:
    if isinstance(value, (list, tuple)) and all(type(each) is int for each in value) and not name.endswith("_id"):
        return [_smaller(name, each, divisor) for each in value]
    if type(value) is not int:
        return value
    if "vocab" in name:
        return min(value, VOCABULARY)
    if name.endswith(("_id", "_token_index", "_token_ids")):
        return value if value < VOCABULARY else VOCABULARY - 1 - sum(map(ord, name)) % 32
    if _COUNTS.search(name):
        return min(value, 2)
    if "image_size" in name or name == "img_size":
        return min(value, SIDE)
    if "expert" in name and "size" not in name and "dim" not in name:
        return min(value, 4 if not re.search("per_tok|top|group", name) else 2)
    if "position" in name:
        return min(value, 256)
    if _KEPT.search(name) or not (_SIZES.search(name) and value >= divisor and value % divisor == 0):
        return value
    return value // divisor


def _seed(number: int) -> None:
    """Of torch, and of NumPy and `random`, which some models draw masks and channels with."""
    from transformers import set_seed

    set_seed(number)


def tried_by(tree: str, kind: Any) -> tuple[Any, dict[str, Any]] | None:
    """A configuration and what forward takes, as Transformers' own tests in `tree` have them for this class."""
    if tree not in sys.path:
        sys.path[:0] = [tree, f"{tree}/utils"]
    *_, folder, file = kind.__module__.split(".")
    try:
        module = importlib.import_module(f"tests.models.{folder}.test_{file}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tests.models."):
            return None  # of a newer family than the tree
        raise
    for each in vars(module).values():
        if getattr(each, "__module__", None) == module.__name__ and hasattr(each, "_prepare_for_class"):
            (case := each()).setUp()
            if kind in (case.all_model_classes or ()):
                sys.modules["tests.test_modeling_common"].global_rng.seed(1)
                torch.manual_seed(1)
                config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
                return config, case._prepare_for_class(inputs, kind, return_labels=True)
    return None


def plain_model(family: str, kind: Any) -> tuple[Any, Any]:
    """The first configuration that gives a small one of this class, and a model; raises PlainCannot."""
    why = "nothing was tried"
    for divisor in (16, 8, 32, 4):
        try:
            config = config_of(family, divisor)
            with torch.device("meta"):
                count = sum(param.numel() for param in kind._from_config(copy.deepcopy(config)).parameters())
            if not 0 < count <= LARGEST:
                why = f"{count} parameters"
                continue
            _seed(0)
            model = kind._from_config(copy.deepcopy(config))
        except Exception as error:
            why = _said(error)
            continue
        return config, model
    raise PlainCannot(why)


def _of(config: Any, *names: str) -> Any:
    """The first attribute of these names that the configuration has, or one below it."""
    from transformers import PreTrainedConfig

    below = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    for each in (config, *below):
        for name in names:
            if isinstance(value := getattr(each, name, None), (int, list, tuple)):
                return value
    return None


def _inputs(model: Any) -> Iterator[dict[str, Any]]:
    """What its forward might take, the likeliest first; the same at every call."""
    config, takes = model.config, inspect.signature(model.forward).parameters
    chance = torch.Generator().manual_seed(1)
    words = {
        name: torch.randint(3, VOCABULARY - 32, (2, LENGTH), generator=chance)
        for name in ("input_ids", "decoder_input_ids")
        if name in takes
    }
    side = _of(config, "image_size", "img_size") or SIDE
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    channels = _of(config, "num_channels", "in_channels") or 3
    pixels = {"pixel_values": torch.rand(2, channels, height, width, generator=chance)}
    mels = _of(config, "num_mel_bins", "feature_size", "input_dim") or 80
    frames = 2 * (_of(config, "max_source_positions") or LENGTH)
    more = {"decoder_input_ids": words["decoder_input_ids"]} if "decoder_input_ids" in words else {}
    tries = [
        words,
        {**words, **pixels},
        pixels,
        {"input_values": torch.rand(2, 4000, generator=chance), **more},
        {"input_values": torch.rand(2, 64, mels if isinstance(mels, int) else 80, generator=chance), **more},
        {"input_features": torch.rand(2, mels, frames, generator=chance), **more},
        {"input_features": torch.rand(2, frames, mels, generator=chance), **more},
        {"pixel_values_videos": torch.rand(2, 4, channels, height, width, generator=chance)},
        {"pixel_values": torch.rand(2, _of(config, "num_frames") or 4, channels, height, width, generator=chance)},
    ]
    if model.main_input_name != "input_ids":
        tries.sort(key=lambda each: model.main_input_name not in each)
    for each in tries:
        if each and set(each) <= set(takes):
            for labels in (words.get("decoder_input_ids", words.get("input_ids")), torch.tensor([0, 1]), None):
                if labels is None:
                    yield each
                elif "labels" in takes:
                    yield {**each, "labels": labels}


def loss_of(model: Callable[..., Any], inputs: dict[str, Any]) -> torch.Tensor:
    """Its loss, or a mean square of what it gives otherwise."""
    _seed(2)  # of dropout, and of masks that NumPy draws
    given = model(**copy.deepcopy(inputs))
    loss = given.get("loss") if hasattr(given, "get") else None
    if loss is None or loss.numel() != 1 or not loss.requires_grad:
        tensors: list[torch.Tensor] = []
        stack = list(given.values()) if hasattr(given, "values") else list(given)
        while stack:
            each = stack.pop()
            if isinstance(each, torch.Tensor) and each.requires_grad and each.is_floating_point():
                tensors.append(each.float().square().mean())
            elif isinstance(each, (list, tuple)):
                stack += each
        loss = torch.stack(tensors).sum()
    return loss.reshape(())


def _trained(model: Any, given: dict[str, Any] | None) -> tuple[dict[str, Any], torch.Tensor]:
    """One step of plain torch, in place; returns what its forward took and the loss. Raises PlainCannot."""
    why = "no inputs that its forward takes are known here"
    before = copy.deepcopy(model.state_dict())
    for inputs in _inputs(model) if given is None else [given]:
        try:
            loss = loss_of(model, inputs)
            loss.backward()
        except Exception as error:
            why = _said(error)
            model.zero_grad()
            continue
        if not math.isfinite(loss.item()):
            why = f"a loss of {loss.item()}"
            model.zero_grad()
            continue
        model.load_state_dict(before)  # buffers that a forward writes
        if not torch.equal(loss_of(model, inputs), loss):
            raise PlainCannot("another loss each time")
        torch.optim.SGD(model.parameters(), 0.1).step()
        if not all(param.isfinite().all() for param in model.parameters()):
            raise PlainCannot("a gradient that is not finite")
        return inputs, loss.detach()
    raise PlainCannot(why)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]


def _differing(model: Any, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Parameters that are not bitwise those of the plain model."""
    import zero

    names = dict(model.named_parameters(remove_duplicate=False))
    with zero.GatheredParameters(names.values()):
        same = {name: torch.equal(param, wanted[name]) for name, param in names.items() if name in wanted}
    return [name for name, equal in same.items() if not equal] + [f"no {name}" for name in wanted.keys() - names.keys()]


def outcome(family: str, name: str, tree: str | None = None) -> str:
    """ "passed", "plain: why" where plain Transformers cannot, or what differs or was raised.

    tree: a folder with the tests of Transformers, whose configurations are taken; None: they are made here.
    """
    with opened(), tempfile.TemporaryDirectory() as own:
        import transformers

        if (kind := getattr(transformers, name, None)) is None:
            return "plain: not there"
        try:
            given = None
            if tree is not None and (known := tried_by(tree, kind)) is not None:
                config, given = known
                for name in vars(config).keys() & {"layerdrop", "encoder_layerdrop", "decoder_layerdrop"}:
                    setattr(config, name, 0.0)  # at stage 3 Transformers runs the layers that it drops
                _seed(0)
                model = kind._from_config(copy.deepcopy(config))
            else:
                config, model = plain_model(family, kind)
            plain = _copies(model)
            model.save_pretrained(own)  # writes on rank 0 only
            dist.broadcast_object_list(shared := [own], 0)
            (folder,) = shared
            frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
            model = kind.from_pretrained(folder).train()
            for name, param in model.named_parameters():
                param.data = param.data.clone()  # in the mapped file, at odd addresses, it computes other last bits
                param.requires_grad_(name not in frozen)  # plain loading forgets what the model's own code has frozen
            loaded = _copies(model)
            inputs, loss = _trained(model, given)
        except Exception as error:
            return f"plain: {error if isinstance(error, PlainCannot) else _said(error)}"
        try:
            return _ours(kind, config, folder, plain, loaded, inputs, loss, _copies(model))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames[-4:]))
            return f"{_said(error)} [{at}]"


def _copies(model: Any) -> dict[str, torch.Tensor]:
    """Of all its parameters, under every name."""
    return {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}


def _ours(
    kind: Any, config: Any, folder: str, plain: Any, loaded: Any, inputs: Any, loss: torch.Tensor, trained: Any
) -> str:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    import zero

    _seed(0)
    with zero.Init():
        built = kind._from_config(copy.deepcopy(config))
    if wrong := _differing(built, plain):
        return f"built under zero.Init: {wrong[:3]} of {len(wrong)}"
    said = HfDeepSpeedConfig(filled(3))
    _seed(0)
    if wrong := _differing(kind._from_config(copy.deepcopy(config)), plain):
        return f"from_config: {wrong[:3]} of {len(wrong)}"
    model = kind.from_pretrained(folder).train()
    if wrong := _differing(model, loaded):
        return f"from_pretrained: {wrong[:3]} of {len(wrong)}"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**filled(3), "gradient_clipping": 0})
    try:
        found = loss_of(engine, inputs)
        engine.backward(found)
        engine.step()
        if not torch.equal(found.detach(), loss):
            return f"loss {found.item()!r}, plain {loss.item()!r}"
        wrong = _differing(engine.module, trained)
        return f"after a step: {wrong[:3]} of {len(wrong)}" if wrong else "passed"
    finally:
        engine.destroy()
        del said


def outcomes(family: str, names: list[str], tree: str | None = None) -> dict[str, str]:
    """`outcome` of classes of one family."""
    torch.set_grad_enabled(True)
    return {name: outcome(family, name, tree) for name in names}


if __name__ == "__main__":
    from ranks import Pool, RankError

    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="families or classes; without any, every class")
    parser.add_argument("--tree", help="a folder with the tests of Transformers, whose configurations are taken")
    asked = parser.parse_args()
    pool = Pool(2)
    for family, names in families().items():
        for name in names:
            if asked.names and not {family, name} & set(asked.names):
                continue
            try:
                ranks = pool.run(2, outcomes, family, [name], asked.tree)
                said = next((each[name] for each in ranks if each[name] != "passed"), "passed")
            except RankError as error:
                said = _said(AssertionError(str(error).strip().splitlines()[-1]))
            print(f"{family}\t{name}\t{said}", flush=True)
    pool.close()
