"""The page in a real browser: ask, read, by mouse and by keyboard, in light and dark.

What a page does is tested in light. What it then shows is checked in light and dark.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import complaints_of
from tests.legibility import IS_DARK, illegible_texts


@pytest.fixture
def blank(clean_tab: Any) -> Iterator[Any]:
    """A tab that shows nothing yet. At the end, the page is legible and has reported no problem."""
    with complaints_of(clean_tab) as complaints:
        yield clean_tab
        assert illegible_texts(clean_tab) == []
    assert [each for each in complaints if "502" not in each and "ERR_FAILED" not in each] == []


@pytest.fixture
def page(blank: Any, weather_agent: Any) -> Any:
    blank.goto(weather_agent.url)
    return blank


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_question_shows_the_answer_and_the_tools(blank: Any, weather_agent: Any, scheme: str) -> None:
    page = blank
    page.emulate_media(color_scheme=scheme)
    page.goto(weather_agent.url)
    assert page.evaluate(IS_DARK) is (scheme == "dark")
    assert illegible_texts(page) == []
    page.get_by_label("Your question").fill("What is the weather tomorrow in Valence?")
    page.get_by_role("button", name="Ask", exact=True).click()

    page.get_by_role("heading", name="Answer").wait_for()
    assert "Valence" in page.locator("#answer").inner_text()
    assert page.locator("#calls h3 code").all_inner_texts() == ["extract_city", "find_city", "forecast"]
    assert page.get_by_role("cell", name="tomorrow").count() == 1
    assert "3 tool calls" in page.get_by_role("status").inner_text()


def test_the_page_works_with_the_keyboard_only(page: Any) -> None:
    page.locator("#question:focus").wait_for()
    page.keyboard.type("Will it rain in Reykjavík?")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Answer").wait_for()
    assert "Reykjavík" in page.locator("#answer").inner_text()

    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#answer").filter(has_text="Valence").wait_for()


def test_clicking_an_example_sends_it(page: Any) -> None:
    page.get_by_role("button", name="How warm is it in São Paulo?").click()

    page.get_by_role("heading", name="Answer").wait_for()
    assert "São Paulo" in page.locator("#answer").inner_text()


def test_the_page_shows_that_it_is_waiting(page: Any) -> None:
    held: list[Any] = []
    page.route("**/weather", lambda route: held.append(route))

    page.get_by_label("Your question").fill("What is the weather in Oslo?")
    page.keyboard.press("Enter")

    page.get_by_text("Asking the agent").wait_for()
    assert illegible_texts(page) == []
    assert page.get_by_role("button", name="Ask", exact=True).is_disabled()
    while not held:  # the request can arrive after the text
        page.wait_for_timeout(10)
    held[0].continue_()
    page.get_by_role("heading", name="Answer").wait_for()
    assert page.get_by_role("button", name="Ask", exact=True).is_enabled()


def test_an_error_is_shown_and_the_next_question_works(page: Any) -> None:
    problem = '{"title": "Bad Gateway", "status": 502, "detail": "the model server is tired"}'
    page.route("**/weather", lambda route: route.fulfill(status=502, body=problem, content_type="application/json"))
    page.get_by_label("Your question").fill("What is the weather in Oslo?")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="the model server is tired").wait_for()
    assert page.locator("#reply").is_hidden()
    assert illegible_texts(page) == []

    page.unroute("**/weather")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Answer").wait_for()
    assert page.locator("#error").is_hidden()


def test_a_lost_server_is_reported(page: Any) -> None:
    page.route("**/weather", lambda route: route.abort())
    page.get_by_label("Your question").fill("What is the weather in Oslo?")
    page.keyboard.press("Enter")

    page.get_by_role("alert").filter(has_text="cannot be reached").wait_for()


def test_an_answer_is_shown_as_text_and_not_as_markup(page: Any) -> None:
    body = (
        '{"answer": "<img src=x onerror=alert(1)>", "tool_executions": [{"name": "<b>x</b>", "arguments": {"<i>": '
        '"<script>"}, "result": "[{\\"<u>\\": \\"<hr>\\"}]", "is_error": true, "duration": 2}]}'
    )
    page.route("**/weather", lambda route: route.fulfill(body=body, content_type="application/json"))
    page.get_by_label("Your question").fill("What is the weather in Oslo?")
    page.keyboard.press("Enter")

    page.get_by_role("heading", name="Answer").wait_for()
    assert page.locator("#answer").inner_text() == "<img src=x onerror=alert(1)>"
    assert page.locator("#reply img, #reply b, #reply i, #reply u, #reply hr, #reply script").count() == 0
    assert page.get_by_text("failed", exact=True).count() == 1


def test_a_narrow_screen_does_not_scroll_horizontally(clean_tab: Any, weather_agent: Any) -> None:
    clean_tab.set_viewport_size({"width": 360, "height": 800})
    clean_tab.goto(weather_agent.url)
    clean_tab.get_by_role("button", name="What is the weather tomorrow in Valence?").click()
    clean_tab.get_by_role("heading", name="Answer").wait_for()

    assert clean_tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_page_of_the_support_desk_chats_and_shows_the_bookings(calm_tab: Any, weather_agent: Any) -> None:
    page = calm_tab
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(f"{weather_agent.url}/support")
    page.get_by_role("cell", name="Zoom Thunderfoot").first.wait_for()
    assert illegible_texts(page) == []

    page.get_by_label("Your message").fill("I am Vroom Lightyear. Please cancel booking 7.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Confirm").wait_for()
    assert illegible_texts(page) == []
    page.get_by_role("button", name="Confirm").click()

    page.get_by_text("cancel_booking", exact=True).wait_for()
    page.locator("tr.cancelled", has_text="Vroom Lightyear").wait_for()
    assert illegible_texts(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_support_desk_lists_conversations_and_goes_on_with_one(blank: Any, weather_agent: Any) -> None:
    page = blank
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(f"{weather_agent.url}/support")
    page.get_by_label("Your message").fill("I am Zoom Thunderfoot. Which bookings do I have?")
    page.keyboard.press("Enter")
    rooms = page.locator("#rooms button")
    rooms.filter(has_text="4 messages").wait_for()
    page.reload()
    rooms.filter(has_text="4 messages").click()
    page.locator("#talk .mine").filter(has_text="I am Zoom Thunderfoot.").wait_for()
    assert page.locator("#talk li").count() == 2
    page.get_by_text("list_bookings", exact=True).wait_for()
    page.get_by_label("Your message").fill("Which bookings do I have?")
    page.keyboard.press("Enter")
    rooms.filter(has_text="8 messages").and_(page.locator("[aria-current]")).wait_for()
    assert illegible_texts(page) == []

    page.get_by_role("button", name="I would like a van.").click()
    page.get_by_text("Your reservation so far: van").wait_for()
    page.get_by_role("button", name="New conversation").click()
    page.locator("#reservation").wait_for(state="hidden")
    page.locator("#talk li").first.wait_for(state="detached")
    page.locator("[aria-current]").wait_for(state="detached")
    page.get_by_label("Your message").fill("Hello.")
    page.keyboard.press("Enter")
    rooms.filter(has_text=", 2 messages").wait_for()
    assert rooms.count() == 3
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_an_answer_of_the_support_desk_is_stopped(blank: Any, weather_agent: Any) -> None:
    page = blank
    held: list[Any] = []
    page.route("**/support", lambda route: held.append(route) if route.request.method == "POST" else route.continue_())
    page.route("**/stop", lambda route: route.fulfill(json=True))
    page.goto(f"{weather_agent.url}/support")
    assert page.get_by_role("button", name="Stop").is_disabled()
    page.get_by_label("Your message").fill("Hello.")
    page.keyboard.press("Enter")
    with page.expect_response("**/stop") as stopped:
        page.get_by_role("button", name="Stop").click()
    assert illegible_texts(page) == []
    conversation = held[0].request.post_data_json["conversation"]
    assert stopped.value.url == f"{weather_agent.url}/support/conversations/{conversation}/stop"

    held[0].fulfill(status=502, json={"title": "Bad Gateway"})
    page.locator("#talk .failed").filter(has_text="Stopped.").wait_for()
    page.locator("#stop:disabled").wait_for()
