"""A headless Chromium without a network, through its own driver."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AXE = "node_modules/axe-core/axe.min.js"
PHONE, DESK = 360, 1100  # CSS pixels


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A driver whose every attempt to reach a host fails; skips where Chromium or selenium is missing."""
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
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


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
    import base64
    import io

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
