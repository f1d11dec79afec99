"""A real Chromium that shows the status page, with a phone's or a desk's screen. Knows elements by what users see."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

NEEDS_CHROMIUM = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs chromium and chromedriver (Debian's packages chromium and chromium-driver)",
)
WAIT_S = 100.0
PHONE, DESK = (360, 740), (1100, 680)


class Browser:
    """One tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def has_screen(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """Take a screen of this width and height."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        [element] = self.all(selector)
        return element

    def type_key(self, key: str, *, keep: bool = False) -> None:
        """Type a key into the form and send it."""
        self.one("#key").send_keys(key)
        if self.one("#keep").is_selected() != keep:
            self.one("#keep").click()
        self.one("#ask button").click()

    def text(self) -> str:
        """What the user sees."""
        return self.one("body").text

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition is true; returns its value."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if value := condition():
                    return value
            except StaleElementReferenceException:
                pass
            assert time.monotonic() < deadline, f"did not come true; the page says:\n{self.text()}"
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """What the console has said since this was asked last: errors, and reports of the content policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def screenshot(self, file: Path) -> None:
        self.driver.save_screenshot(str(file))


@contextmanager
def open_browser(directory: Path) -> Iterator[Browser]:
    """Run Chromium with a new profile in `directory`."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--disable-dev-shm-usage", "--no-proxy-server", f"--user-data-dir={directory}"):
        options.add_argument(flag)
    if os.getuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox refuses root, as which containers run
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
