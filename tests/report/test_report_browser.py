"""The report in a real browser: nothing is fetched, nothing runs, and it fits a phone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from report_samples import sample_report
from test_report import numbered_payload

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on this machine"),
]


def test_hostile_report_fetches_and_runs_nothing(tmp_path: Path) -> None:
    html_path, _ = sample_report(numbered_payload()).write(tmp_path)  # type: ignore[arg-type]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        requests: list[str] = []
        console: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: console.append(message.text))
        page.goto(html_path.as_uri())
        page.wait_for_timeout(300)
        assert [url for url in requests if not url.startswith("data:")] == [html_path.as_uri()]
        assert page.evaluate("window.hit") is None
        assert console == []
        assert page.locator("table.gates .pill").count() == 3
        assert page.locator("img").first.evaluate("image => image.naturalWidth") == 5
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
