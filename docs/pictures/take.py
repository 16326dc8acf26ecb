"""Takes the pictures for the README and the docs: the views of the dev UI, in a real browser.

    make pictures

Serves `desk.py`, drives its dev UI in headless Chromium, and writes PNG files to this folder: each view in light and in
dark, of the same calls. Needs Chromium on the PATH, or `CHROMIUM=/path/to/chromium`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
METHOD = "RefundDesk.chat"
QUESTION = "The reading lamp of order 7 arrived broken. Please refund it."
TOKEN = "for-the-pictures"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def main() -> int:
    """Take all pictures; return 1 if there is no browser."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("Chromium was not found; install it, or set CHROMIUM=/path/to/chromium", file=sys.stderr)
        return 1
    with desk() as address, sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        take_all(browser, address)
        browser.close()
    return 0


@contextmanager
def desk() -> Iterator[str]:
    """Serve the refund desk on a free port, with a new database; yield its address."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TOOLBOX_"))}
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"TOOLBOX_DEV_UI_TOKEN": TOKEN, "TOOLBOX_SQL__URL": f"sqlite:///{folder}/desk.db"}
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{HERE}"
        command = [sys.executable, "-m", "uvicorn", "desk:app", "--port", "0"]
        with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                found = None
                while found is None:
                    line = process.stderr.readline()
                    assert line, "the refund desk did not start"
                    found = re.search(r"running on http://127\.0\.0\.1:(\d+)", line)
                yield f"http://localhost:{found[1]}"
            finally:
                process.terminate()


def take_all(browser: Browser, address: str) -> None:
    """Call the desk twice, so that the second call is warm, then take each view in both color schemes."""
    tab = browser.new_page(viewport={"width": 1000, "height": 640}, device_scale_factor=2, reduced_motion="reduce")
    tab.goto(f"{address}/dev-ui/?token={TOKEN}#chat/{METHOD}")
    ask(tab, "warm-up")
    ask(tab, "ann-7")
    take(tab, "chat")
    tab.get_by_role("link", name="Open the inbox").last.click()
    tab.get_by_role("button", name="Approve").wait_for()
    take(tab, "inbox")
    tab.get_by_role("button", name="Approve").click()
    tab.get_by_text("still under warranty").first.wait_for()
    for view in ("tools", "conversations", "beans", "reach", "log"):
        tab.get_by_role("link", name=view.capitalize(), exact=True).click()
        tab.locator(f"#{view}").wait_for()
        if view == "tools":
            tab.get_by_role("link", name="refund").click()
        if view == "conversations":
            tab.get_by_role("heading", name="What was said").wait_for()
        if view == "log":
            tab.locator("#log summary").first.click()
        take(tab, view)
    tab.close()


def ask(tab: Page, conversation: str) -> None:
    """Ask the desk, and wait until its call needs an approval."""
    tab.get_by_label("Memory id").fill(conversation)
    tab.locator("form.talk textarea").first.fill(QUESTION)
    tab.get_by_role("button", name="Send").click()
    tab.get_by_role("status").filter(has_text="Suspended").wait_for()


def take(tab: Page, view: str) -> None:
    """Take a view in both color schemes. The page shows the same calls in both."""
    for scheme in SCHEMES:
        tab.emulate_media(color_scheme=scheme)
        tab.screenshot(path=HERE / f"{view}-{scheme}.png")
    tab.emulate_media(color_scheme="light")


if __name__ == "__main__":
    sys.exit(main())
