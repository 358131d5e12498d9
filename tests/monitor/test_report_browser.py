"""The promise: the report can be read in a real browser: drawn, on a phone, at 200 %, without colour, without a mouse.

It also makes the pictures of docs/report.md: ZERO_WRITE_IMAGES=1 writes them to docs/images.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_folders
from launching import ROOT

IMAGES = ROOT / "docs" / "images"
STEPS = 10_000
WRONG = ("SEVERE", "WARNING")
PHONE, DESK = 360, 1100  # CSS pixels

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bokeh")
    folder = run_folders.write(tmp_path_factory.mktemp("runs") / "gpt", range(1, STEPS + 1))
    command = [sys.executable, "-m", "zero", "report", "--run", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, by its own driver, whose every attempt to reach a host fails."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium with its driver: Debian's chromium and chromium-driver (`make nodes`)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as made:
        yield made


def show(browser: Any, page: Path, width: int, zoom: float = 1) -> None:
    """Open the page in a window of `width` CSS pixels at this zoom, and wait until its charts are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    # As a user's zoom does: fewer CSS pixels in the same window, each of them larger.
    metrics = {"width": int(width / zoom), "height": 900, "deviceScaleFactor": zoom, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.resolve().as_uri())
    drawn = "return window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents.every((each) => each.is_idle)"
    WebDriverWait(browser, 60).until(lambda it: it.execute_script(drawn))


def picture(browser: Any, out: Path, element: str | None = None) -> None:
    """Write what is seen of one element (a CSS selector), or of the window, as a PNG of few colours."""
    from PIL import Image

    clip = {"x": 0, "y": 0, **browser.execute_script("return {width: innerWidth, height: innerHeight}"), "scale": 1}
    if element is not None:
        box = "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
        box += "return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height}"
        clip |= browser.execute_script(box, element)
    given = {"captureBeyondViewport": True, "clip": clip}
    png = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", given)["data"])
    out.parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64).save(out, optimize=True)


def test_ten_thousand_steps_take_less_than_five_megabytes(page: Path) -> None:
    assert page.stat().st_size < 5e6
    assert "not all." not in page.read_text(), "all points are there"


def test_all_charts_are_drawn_without_a_word_in_the_console_or_a_request(browser: Any, page: Path) -> None:
    browser.get_log("browser")
    show(browser, page, DESK)
    inked = """
        const canvases = [];
        const walk = (node) => {
            if (node.tagName === "CANVAS") canvases.push(node);
            for (const child of [...node.children, ...(node.shadowRoot?.children ?? [])]) walk(child);
        };
        return [...document.querySelectorAll("figure")].map((figure) => {
            canvases.length = 0;
            walk(figure);
            const colours = new Set();
            for (const canvas of canvases) {
                if (!canvas.width || !canvas.height) continue;
                const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                for (let i = 0; i < data.length; i += 4) {
                    if (data[i + 3]) colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
                }
            }
            return colours.size;
        });
    """
    colours = browser.execute_script(inked)
    assert len(colours) == 10
    assert min(colours) > 20, "each has axes, text and lines"
    assert [entry for entry in browser.get_log("browser") if entry["level"] in WRONG] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)") == []


@pytest.mark.parametrize(("width", "zoom"), [(PHONE, 1), (DESK, 2), (DESK, 1)], ids=["phone", "200 %", "desk"])
def test_nothing_is_wider_than_the_window(browser: Any, page: Path, width: int, zoom: int) -> None:
    show(browser, page, width, zoom)
    across, inside = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert inside == width // zoom
    assert across <= inside


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_axe_finds_nothing(browser: Any, page: Path, width: int) -> None:
    found = importlib.util.find_spec("axe_core_python")
    if found is None:
        pytest.skip("axe-core-python is not installed")
    show(browser, page, width)
    browser.execute_script("document.querySelectorAll('details').forEach((each) => each.open = true)")
    browser.execute_script((Path(found.origin).parent / "axe.min.js").read_text())
    run = "axe.run(document).then(arguments[0], (error) => arguments[0]({violations: [{id: String(error)}]}))"
    result = browser.execute_async_script(run)
    assert [(each["id"], [node["html"] for node in each.get("nodes", ())]) for each in result["violations"]] == []
    assert len(result["passes"]) > 15


def test_every_table_and_detail_is_reached_by_the_keyboard(browser: Any, page: Path) -> None:
    show(browser, page, PHONE)
    reached = browser.execute_script(
        "return [...document.querySelectorAll('.wide, pre, summary, nav a')].filter((each) => each.tabIndex < 0).length"
    )
    assert reached == 0
    assert browser.execute_script("return document.querySelectorAll('summary').length") == 9


def test_without_colour_the_lines_of_a_chart_still_differ(page: Path) -> None:
    """As the file says it; what it looks like is in the pictures."""
    from zero.tools.report.charts import Bar, Curve, line_chart, timeline

    np = pytest.importorskip("numpy")
    x = np.arange(50.0)
    chart = line_chart([Curve(f"line {i}", x, x * i) for i in range(8)], "what")
    glyphs = [renderer.glyph for renderer in chart.renderers]
    looks = {(str(line.line_dash), mark.marker) for line, mark in zip(glyphs[::2], glyphs[1::2], strict=True)}
    assert len(looks) == 8
    verbs = ("wait", "gather", "forward", "backward", "recompute", "reduce", "step", "update", "copy", "release")
    bars = timeline([Bar("rank 0", f"{verb} blocks.0", i, i + 1.0) for i, verb in enumerate(verbs)])
    assert len({renderer.glyph.hatch_pattern for renderer in bars.renderers}) == 10


def test_pictures_of_it_are_made(browser: Any, page: Path, tmp_path: Path) -> None:
    out = IMAGES if os.environ.get("ZERO_WRITE_IMAGES") == "1" else tmp_path
    show(browser, page, DESK)
    picture(browser, out / "report-loss.png", "section:nth-of-type(2)")
    picture(browser, out / "report-memory.png", "section:nth-of-type(7)")
    picture(browser, out / "report-timeline.png", "section:nth-of-type(11)")
    show(browser, page, PHONE)
    picture(browser, out / "report-phone.png", "section:nth-of-type(8)")
    assert all(5_000 < image.stat().st_size < 150_000 for image in out.glob("report-*.png"))
    assert len(list(out.glob("report-*.png"))) == 4
