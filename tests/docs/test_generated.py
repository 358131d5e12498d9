"""The promise: what scripts write of the documentation is as they write it now; the pages build without a warning."""

from __future__ import annotations

import html
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from marks import needs
from nodes import environment

import zero

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_config_is_what_the_sections_say() -> None:
    written = runpy.run_path(str(DOCS / "write_config.py"))["page"]()
    assert (DOCS / "config.md").read_text() == written, "python docs/write_config.py writes it anew"
    assert "| `stage` | integer from 0 to 3 | 0 |" in written


def test_the_classes_of_the_centre_and_the_map_are_as_the_code_has_them() -> None:
    written = runpy.run_path(str(DOCS / "write_internals.py"))
    there = {"internals.md": written["internals"](), "../CONTRIBUTING.md": written["contributing"]()}
    for name, page in there.items():
        assert (DOCS / name).read_text() == page, f"python docs/write_internals.py writes {name} anew"
    assert "| `Unit` |" in there["internals.md"]
    assert "param_buffer.py" in there["../CONTRIBUTING.md"]


def test_the_figures_are_there_and_small() -> None:
    drawn = {path.name: path.stat().st_size for path in (DOCS / "figures").glob("*.svg")}
    assert set(drawn) == {"memory.svg", "mesh.svg", "plan.svg", "timeline.svg"}
    assert max(drawn.values()) < 30_000


@pytest.mark.long
def test_the_figures_are_what_their_script_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runpy.run_path(str(DOCS / "figures" / "draw.py"))["main"](tmp_path)
    for path in (DOCS / "figures").glob("*.svg"):
        assert path.read_text() == (tmp_path / path.name).read_text(), "python docs/figures/draw.py draws it anew"


def test_each_argument_of_a_docstring_is_an_item_of_its_own() -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    lines = (zero.init_distributed.__doc__ or "").split("\n    ")
    runpy.run_path(str(DOCS / "conf.py"))["as_restructured_text"](None, "", "", zero.init_distributed, None, lines)
    items = re.findall("^- ``(.*?)``", "\n".join(lines), re.MULTILINE)
    assert {"distributed_port", "timeout", "init_method, rank, world_size", "verbose, config"} <= set(items)
    ended = lines.index("") < lines.index(next(line for line in lines if line.startswith("Raises")))
    assert ended, "what is raised belongs to no argument"


def inside_of_others(page: str) -> list[str]:
    """The names of arguments in the text of an item of another argument."""
    items = re.findall(r"<li><p><code[^>]*>(.*?)</code>(: .*?)</p></li>", page, re.DOTALL)
    texts = [(re.sub("<[^>]*>", "", name), html.unescape(re.sub("<[^>]*>", "", text))) for name, text in items]
    known = {name for names, _ in texts for name in names.split(", ")}
    assert len(known) > 60
    return [
        f"{at}: {name}"
        for at, text in texts
        for name in re.findall(r"[.;]\s(?:\w+ or )?(\w+):\s", text)
        if name in known
    ]


@pytest.mark.long
@needs("sphinx", "myst_parser", "lightning")
def test_the_pages_build_without_a_warning_or_a_network(tmp_path: Path) -> None:
    # A connection that is tried would be refused at once.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", str(DOCS), str(tmp_path)],
        env=environment(**nowhere),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "deepspeed.html").read_text()
    assert "_static/find.js" in page and 'id="what-of-deepspeed-works-here"' in page, "its box finds a name"
    api = (tmp_path / "api.html").read_text()
    assert not inside_of_others(api)
    assert all(f'id="zero.{name}"' in api for name in ("initialize", "Engine.step", "Init", "lightning.ZeroStrategy"))
