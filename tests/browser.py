"""A real browser for the tests of saved pages."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Any]:
    """A fresh Chromium with its profile in `folder`; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver)
    browser = webdriver.Chrome(options=options, service=service)
    try:
        yield browser
    finally:
        browser.quit()


def show(browser: Any, path: Path, width: int = 1280, dark: bool = False) -> None:
    """Opens a file in a window of a width in CSS pixels."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []


def overflow(browser: Any) -> int:
    """CSS pixels by which the page is wider than its window."""
    script = "return document.documentElement.scrollWidth - innerWidth"
    return browser.execute_script(script)


def hover(browser: Any, element: Any) -> str:
    """Moves the mouse to the middle of an element; the tooltip's text."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    script = "arguments[0].scrollIntoView({block: 'center'})"
    browser.execute_script(script, element)
    ActionChains(browser).move_to_element(element).perform()
    tips = browser.find_elements(By.CSS_SELECTOR, ".jm-tip:not([hidden])")
    return tips[0].text if tips else ""
