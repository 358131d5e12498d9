"""The model that `zero plan` is asked about, on the meta device: a function's, or that of a Hugging Face folder."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from zero.sizes.model_trace import Inputs

_META = torch.device("meta")
_TOKENS = 2  # samples of a model of transformers


def load_model(text: str, sequence: int, device: torch.device = _META) -> tuple[nn.Module, Inputs]:
    """A model in training mode, and the arguments of its forward; on the meta device nothing is allocated.

    text: `module:function`, which is called without arguments and gives a model and its inputs: a tuple, or a dict by
    names, with samples along the first dimension. Or a folder with the config.json of a Hugging Face model, whose
    inputs are ids and labels of `sequence` tokens. Raises ValueError where there is no model, and where its inputs are
    not known; ImportError without transformers.
    """
    if os.path.isdir(text):
        model, inputs = _of_folder(Path(text), sequence, device)
    else:
        model, inputs = _of_function(text, device)
    return model.to(device).train(), inputs


def _of_function(text: str, device: torch.device) -> tuple[nn.Module, Inputs]:
    name, _, function = text.partition(":")
    sys.path.insert(0, "")  # as `python -m` does: modules of the folder that the command is called in
    try:
        make = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"model: {text!r}: {error}; call zero plan in the folder of that module") from error
    finally:
        sys.path.remove("")
    for part in function.split("."):
        if not hasattr(make, part):
            raise ValueError(f"model: {text!r}: '{name}' has no {function}; wanted a function without arguments")
        make = getattr(make, part)
    with device:
        made = make()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {text} gave a {type(model).__name__}; wanted a torch.nn.Module and its inputs")
    if inputs is None:
        raise ValueError(
            f"model: {text} gave a {type(model).__name__} alone, and what its forward takes is not known; have it give "
            "(model, inputs), such as (model, (torch.zeros(1, 2048, dtype=torch.long),))"
        )
    return model, inputs if isinstance(inputs, Mapping | tuple | list) else (inputs,)


def _of_folder(folder: Path, sequence: int, device: torch.device) -> tuple[nn.Module, Inputs]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model: {folder} has no config.json; wanted the folder of a Hugging Face model")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{path} is read by transformers; pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(folder)
    named = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    kind = getattr(transformers, named[0], None) if named else None
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind._from_config(config)
    if model.main_input_name != "input_ids" or "labels" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"model: a {type(model).__name__} takes more than ids and labels of tokens, and what is not known; write a "
            "function that gives (model, inputs), and say module:function"
        )
    tokens = torch.zeros(_TOKENS, sequence, dtype=torch.long, device=device)
    model.config.use_cache = False
    return model, {"input_ids": tokens, "labels": tokens}
