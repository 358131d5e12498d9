"""A pool of ranks whose libraries find zero as deepspeed; other ranks must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Pool

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made, none is loaded from elsewhere


@pytest.fixture(scope="session")
def door() -> Iterator[Pool]:
    """Two gloo ranks for all tests of this folder."""
    for library in ("accelerate", "datasets", "peft", "trl"):
        pytest.importorskip(library)
    made = Pool(2)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    from huggingface_cases import make_model

    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder)
    return folder
