"""The page of docs/front-end.md works in a browser.

Not here: the programs and links of the documentation (`test_documents`), the page of the dev UI (`fastapi`).
"""

from pathlib import Path
from typing import Any

import pytest

from tests.test_documents import ROOT, lay_out, served

pytestmark = pytest.mark.timeout(400)  # starts a server and a browser


def test_the_documented_page_streams_an_answer_after_an_approval(calm_tab: Any, tmp_path: Path) -> None:
    lay_out(ROOT / "docs" / "front-end.md", tmp_path)
    with served("desk:app", tmp_path) as address:
        calm_tab.route("**/favicon.ico", lambda route: route.fulfill(status=204))
        calm_tab.goto(address)

        calm_tab.get_by_role("button", name="Send").click()
        calm_tab.get_by_role("button", name="Yes").click()

        calm_tab.get_by_text("Order 7 is cancelled.").wait_for()
        assert calm_tab.get_by_text("Used cancel_order").count() == 1
