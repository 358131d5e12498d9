"""The promise: every key that this release does not have says so once it is switched on, and none is ever silent."""

from __future__ import annotations

from typing import Any

import pytest
from config_marks import unavailable

from zero.config import ConfigError, load
from zero.config.unavailable import Unavailable

# Values that a key may be switched on with; which of them switch it on, its mark says.
VALUES: tuple[Any, ...] = (True, False, 2, "sum", "cpu", "nvme", {"enabled": True}, {"x": {"enabled": True}}, {"x": 1})
VALUES += ("pre", "softmax")


def written(path: str, value: Any) -> dict[str, Any]:
    """A config that gives `value` to the key at the dotted `path`."""
    for part in reversed(path.split(".")):
        value = {part: value}
    if "optimizer" in value:
        value["optimizer"] = {"type": "AdamW", **value["optimizer"]}
    return {"train_batch_size": 8, **value}


def errors(path: str, value: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(written(path, value), 1)
    return caught.value.errors


@pytest.mark.parametrize(("path", "mark"), unavailable().items(), ids=unavailable())
def test_what_is_not_available_says_so_and_what_is_switched_off_is_accepted(path: str, mark: Unavailable):
    exact = [f"{path}: {mark.message}"]
    switched_on = [value for value in VALUES if mark.on(value)]
    assert switched_on, "no value of this test switches the key on"
    # A value of another type is refused as such; one of the right type with the mark's sentence and nothing else.
    found = [list(errors(path, value)) for value in switched_on]
    assert exact in found
    assert not mark.on(None), "a key that is not given must be off"
    accepted = 0
    for value in (False, True, 0, 1, "mean", "none", "auto", None, {}, {"enabled": False}):
        if not mark.on(value):
            try:
                load(written(path, value), 1)
                accepted += 1
            except ConfigError as error:
                assert all("wanted" in line or "got 'auto'" in line for line in error.errors), error
    assert accepted
