"""The pictures of the README and the documentation can be taken: `make pictures`.

Not here: what the dev UI shows (`fastapi`).
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"

pytestmark = pytest.mark.timeout(400)  # starts a server and a browser


def test_each_view_is_taken_in_light_and_in_dark(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specification = importlib.util.spec_from_file_location("take", PICTURES / "take.py")
    assert specification is not None
    assert specification.loader is not None
    take = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(take)
    with take.desk() as address:
        monkeypatch.setattr(take, "HERE", tmp_path)
        take.take_all(browser, address)

    taken = {each.name for each in tmp_path.iterdir()}
    assert taken == {each.name for each in PICTURES.glob("*.png")}
