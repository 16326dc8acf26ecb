"""Takes the pictures for the README and the docs: the sample's page and the dev UI, in a real browser.

    make pictures

Starts the sample application with its embedded model, drives it in headless Chromium, and writes PNG files to this
folder. Needs Chromium on the PATH, or `CHROMIUM=/path/to/chromium`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
QUESTION = "What is the weather tomorrow in Valence?"
TOKEN = "for-the-pictures"


def main() -> int:
    """Take all pictures; return 1 if there is no browser."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("Chromium was not found; install it, or set CHROMIUM=/path/to/chromium", file=sys.stderr)
        return 1
    with sample() as address, sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        for scheme in ("light", "dark"):
            take_sample(browser, address, scheme)
            take_timeline(browser, address, scheme)
        browser.close()
    return 0


@contextmanager
def sample() -> Iterator[str]:
    """Serve the sample on a free port; yield its address."""
    chosen = ("OPENAI_", "TOOLBOX_", "OPEN_METEO")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    environment["TOOLBOX_DEV_UI_TOKEN"] = TOKEN
    command = [sys.executable, "-m", "sample_app", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://localhost:\d+", process.stdout.readline())
            assert found is not None, "the sample did not print its address"
            yield found[0]
        finally:
            process.terminate()


def new_page(browser: Browser, scheme: str, width: int, height: int) -> Page:
    """Open a page that looks the same each time: fixed size, no animations."""
    return browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": height},
        reduced_motion="reduce",
    )


def take_sample(browser: Browser, address: str, scheme: str) -> None:
    """Ask the weather agent, and show its answer with the tool calls behind it."""
    page = new_page(browser, scheme, 920, 860)
    page.goto(address)
    page.get_by_label("Your question").fill(QUESTION)
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_role("heading", name="Answer").wait_for()
    page.screenshot(path=HERE / f"sample-{scheme}.png")
    page.close()


def take_timeline(browser: Browser, address: str, scheme: str) -> None:
    """Call the agent in the dev UI, and show the timeline with one tool call open."""
    page = new_page(browser, scheme, 1120, 700)
    page.goto(f"{address}/dev-ui/?token={TOKEN}#chat/WeatherForecastAgent.chat")
    page.locator("form.talk textarea").first.fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("status").filter(has_text="Answered").wait_for()
    page.locator("#chat .timeline summary").filter(has_text="find_city").first.click()
    page.locator("#chat .turn").last.scroll_into_view_if_needed()
    page.screenshot(path=HERE / f"timeline-{scheme}.png")
    page.close()


if __name__ == "__main__":
    sys.exit(main())
