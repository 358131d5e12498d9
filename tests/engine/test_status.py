"""The promise: docs/deepspeed.md tells the truth about which names and keys exist.

What its tables call working is there, what they call missing is not, and a key that is said to be refused is refused.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from config_marks import idle, unavailable
from models import config, make_net

import zero
from zero.config import ConfigError, load
from zero.config.file import sections
from zero.engine.getters import DeepSpeedGetters

TEXT = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
KEYS = "Keys of the JSON"
BEHAVIOUR = "Behaviour"
STAGES = "The engine of a model in stages"
PARAMETERS = "Parameters under stage 3"
ADAPTER = "Names of `deepspeed`"  # tests/huggingface/test_names.py


class Row(NamedTuple):
    """One name of one table."""

    table: str
    name: str
    status: str


def rows() -> list[Row]:
    found = []
    for section in TEXT.split("\n## ")[1:]:
        table, body = section.split("\n", 1)
        lines = [line for line in body.splitlines() if line.startswith("|")][2:]
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
            if table != BEHAVIOUR:
                found += [Row(table, name, cells[1]) for name in re.findall(r"`([^`]+)`", cells[0])]
    return found


ROWS = rows()


def holder(table: str) -> Any:
    """What has, or has not, the names of a table. The engine wraps a model without such names."""
    if table.startswith("Functions of"):
        return importlib.import_module(re.findall(r"`(.+)`", table)[0])
    engine = zero.initialize(model=make_net(), config=config(0, 1))[0]
    if table == STAGES:
        engine.destroy()
        engine = zero.initialize(model=make_net(), config=config(0, 1), loss_fn=torch.nn.MSELoss())[0]
    return {
        "The engine": engine,
        STAGES: engine,
        "The optimizer": engine.optimizer,
        PARAMETERS: next(engine.parameters()),
    }[table]


def test_the_tables_are_read():
    assert len(ROWS) > 150
    assert {row.status for row in ROWS} == {"works", "differs", "idle", "planned", "no"}
    assert len({row[:2] for row in ROWS}) == len(ROWS), "a name stands there twice"


@pytest.mark.parametrize("table", sorted({row.table for row in ROWS} - {KEYS, ADAPTER}))
def test_names_exist_as_the_tables_say(table):
    # These two come with torch.optim.Optimizer; ours raise.
    inherited = {"state_dict", "load_state_dict", "grid"}  # and a grid wants a process group
    what = holder(table)
    there = {row: hasattr(what, row.name) for row in ROWS if row.table == table and row.name not in inherited}
    assert [row for row, found in there.items() if found != (row.status in ("works", "differs"))] == []


def test_keys_are_refused_or_idle_as_the_table_says():
    status = {row.name: row.status for row in ROWS if row.table == KEYS}
    said = {key: "refused" if key in unavailable() else "idle" if key in idle() else "taken" for key in status}
    wanted = {"works": "taken", "differs": "taken", "idle": "idle", "planned": "refused", "no": "refused"}
    assert said == {key: wanted[value] for key, value in status.items()}
    yet = {key for key, mark in unavailable().items() if "not there yet" in mark.message}
    assert yet & status.keys() == {key for key, value in status.items() if value == "planned"}


def test_every_key_is_known():
    """A key of the table is none that the configuration would call unknown."""
    for row in ROWS:
        if row.table == KEYS:
            values: dict[str, Any] = {"train_batch_size": 8}
            here, parts = values, row.name.split(".")
            for part in parts[:-1]:
                here = here.setdefault(part, {})
            here.setdefault(parts[-1], {"no": "such value"})
            try:
                load(values, 1)
            except ConfigError as error:
                assert f"unknown key '{parts[-1]}'" not in str(error), row.name


def test_what_answers_with_a_key_answers():
    """Each getter of the engine that names a key reads one that the configuration has."""
    engine = zero.initialize(model=make_net(), config=config(0, 1))[0]
    asked = [name for name, value in vars(DeepSpeedGetters).items() if getattr(value, "__name__", None) == "value"]
    assert len(asked) > 40
    for name in asked:
        path = re.findall("`(.+)`", getattr(DeepSpeedGetters, name).__doc__)[0].split(".")
        assert path[-1] in sections()[tuple(path[:-1])].model_fields, name
        getattr(engine, name)()
