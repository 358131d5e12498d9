"""A plugin of pytest: the outcome of each test goes to a file."""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line of JSON for each test, or two where what follows the test fails, too; they stay if a later one hangs."""
    if report.when != "call" and report.passed:
        return
    why = report.longrepr[2] if report.skipped else getattr(report.longrepr, "reprcrash", None) or report.longrepr or ""
    case = {
        "test": report.nodeid.split("::", 1)[1],
        "outcome": report.outcome,
        "why": str(getattr(why, "message", why)),
    }
    with open(os.environ["ZERO_SUITES_OUTCOMES"], "a") as file:
        file.write(json.dumps(case) + "\n")
