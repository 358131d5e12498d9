"""The table on a screen: by rich where it is installed and somebody looks, as text elsewhere."""

from __future__ import annotations

import sys

from zero.engine.check.compare import Report, cells


def show(report: Report) -> None:
    """Print the report to stdout."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            head, *lines = cells(report.rows)
            table = Table(*head, title="Largest differences from plain torch, absolute (relative)")
            for line, row in zip(lines, report.rows, strict=True):
                table.add_row(*line, style=None if row.good else "bold red")
            Console().print(table)
            print("\n".join(report.closing))
            return
    print(report, flush=True)
