"""The dev UI's page in a real browser: by mouse and by keyboard, in light and dark, wide and narrow.

What a page does is tested in light. What it then shows is checked in light and dark.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from tests.conftest import complaints_of
from tests.legibility import IS_DARK, illegible_texts
from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    Instance,
    MemoryId,
    Result,
    TokenStream,
    application_scoped,
    call_scoped,
    only_if,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.guardrails import GuardrailResult, ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.security import SecurityIdentity, authenticated, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import DevUi, Inject, install

from .test_dev_ui_inbox import desk

pytestmark = pytest.mark.timeout(400)  # starts processes

TOKEN = "a token of this test"
VIEWS = ("Chat", "Tools", "Inbox", "Conversations", "Beans", "Reach", "Log")
NAMELESS = """() =>
    [...document.querySelectorAll("input, textarea, select, button, a, [role=button], [role=region]")]
        .filter(each => each.checkVisibility())
        .filter(each => !(each.getAttribute("aria-label") || each.labels?.length || each.textContent.trim()))
        .map(each => each.outerHTML)"""
# The contrast of the page's colors that are used together, as WCAG defines it.
PALETTE = """() => {
    const style = getComputedStyle(document.documentElement);
    const light = name => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = style.getPropertyValue(name);
        const channels = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(each => each / 255);
        probe.remove();
        const [r, g, b] = channels.map(each => each <= .03928 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const pairs = [["--text", "--page"], ["--text", "--card"], ["--quiet", "--page"], ["--quiet", "--card"],
        ["--quiet", "--sunken"], ["--accent", "--card"], ["--accent", "--soft"], ["--on-accent", "--accent"],
        ["--bad", "--card"], ["--bad", "--bad-soft"]];
    return pairs.map(([one, other]) => {
        const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
        return [one, other, (high + .05) / (low + .05)];
    });
}"""


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Topping(BaseModel):
    name: str
    grams: int = 10


@application_scoped
class Kitchen: ...


@request_scoped
class Basket:
    def __init__(self, kitchen: Kitchen) -> None: ...

    @tool
    def add(
        self,
        dish: Annotated[str, "the dish's name"],
        count: int = 1,
        size: Size = Size.SMALL,
        hot: bool = True,
        toppings: list[Topping] = [],  # noqa: B006 - created for each call
        seat: int | str | None = None,
    ) -> str:
        """Puts a dish into the basket."""
        said = ", ".join(f"{each.grams} g {each.name}" for each in toppings)
        return f"{count} {size.value} {'hot' if hot else 'cold'} {dish} with {said or 'nothing'} for {seat!r}"


@only_if(profile="prod")
class Delivery: ...


@call_scoped
class Session:
    def __init__(self, basket: Instance[Basket]) -> None: ...


class Till:
    def __init__(self, session: Session) -> None: ...

    @tool
    def pay(self) -> str:
        raise ValueError("<b>no change</b>")


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    barks: bool


@tool
def adopt(pet: Cat | Dog, plans: list[list[str]]) -> str:
    """Adopts a pet."""
    return repr((pet, plans))


@tool
def recite() -> str:
    """Recites a long poem."""
    return ("word " * 99 + "end.\n") * 210


@tool
async def wait() -> None:
    """Waits for what never comes."""
    await asyncio.Event().wait()


@register_ai_service(tools=(adopt, recite))
class Helper(Protocol):
    @tool
    async def assist(self, what: str) -> str:
        """Helps with something."""
        ...


@register_ai_service(tools=Helper)
class Host(Protocol):
    async def manage(self, wish: str) -> str: ...


@register_ai_service(tools=(Basket, Till, wait))
class Waiter(Protocol):
    """Serves guests."""

    async def serve(self, table: MemoryId[str], wish: str) -> Result[str]: ...
    def tell(self, wish: str) -> TokenStream: ...
    def count(self, wish: str) -> AsyncIterator[int]: ...
    async def fail(self, wish: str) -> str: ...


def reply_to(request: ChatRequest) -> AiMessage:
    """Return the reply of the model: it calls the tool that the question names, once, then answers."""
    said = [each.text for each in request.messages if type(each).__name__ == "UserMessage"][-1]
    if type(request.messages[-1]).__name__ == "ToolExecutionResultMessage":
        return AiMessage(f"Coming: <i>{request.messages[-1].text}</i>")
    if "wait" in said:
        return AiMessage(None, [tool_call("wait")])
    if "delegate" in said:
        return AiMessage(None, [tool_call("assist", {"what": "the wine"}), tool_call("assist", {"what": "the bill"})])
    if "the " in said:
        return AiMessage("It is done.")
    if "boom" in said:
        raise RuntimeError("the oven is off")
    if "numbers" in said:
        return AiMessage('{"value": [7, 8]}')
    if "pay" in said:
        return AiMessage(None, [tool_call("pay"), tool_call("add", {"dish": "receipt"})])
    return AiMessage(None, [tool_call("add", {"dish": "soup"})])


def restaurant() -> FastAPI:
    app = FastAPI(title="The restaurant")
    model = ScriptedChatModel([reply_to] * 1000)
    install(
        app,
        Container(models={"default": model}).register(Waiter, Host, Helper, Kitchen, Basket, Session, Till, Delivery),
        dev_ui=DevUi(token=TOKEN),
    )

    @app.post("/serve")
    async def serve() -> None: ...

    return app


@pytest.fixture(scope="module")
def address(serving_on_a_thread: Any) -> Iterator[str]:
    with serving_on_a_thread(restaurant()) as url:
        yield f"{url}/dev-ui/"


@pytest.fixture
def admitted(clean_tab: Any, address: str) -> Iterator[Any]:
    """A tab that has the token and shows nothing yet. At the end, the page is legible and has reported no problem."""
    with complaints_of(clean_tab, lambda asked: asked.startswith((address, "data:"))) as complaints:
        assert clean_tab.request.get(f"{address}?token={quote(TOKEN)}", max_redirects=0).status == 303
        yield clean_tab
        assert illegible_texts(clean_tab) == []
    assert [each for each in complaints if "422" not in each] == []


@pytest.fixture
def page(admitted: Any, address: str) -> Any:
    """The page as it is after its start."""
    admitted.goto(address)
    admitted.get_by_role("heading", name="Waiter.serve").wait_for()
    return admitted


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_starts_in_light_and_dark_and_each_view_is_legible(admitted: Any, address: str, scheme: str) -> None:
    page = admitted
    page.emulate_media(color_scheme=scheme)
    page.goto(address)
    for view in VIEWS:
        page.get_by_role("link", name=view, exact=True).click()
        page.locator(f"#view-{view.lower()}").wait_for()
        if view in ("Inbox", "Conversations"):
            page.get_by_text("No runs." if view == "Inbox" else "No conversations.").wait_for()
        assert page.evaluate(IS_DARK) is (scheme == "dark")
        assert [each for each in page.evaluate(PALETTE) if each[2] < 4.5] == []
        assert page.evaluate(NAMELESS) == []
        assert illegible_texts(page) == []


def test_a_service_is_called_and_its_tools_are_on_a_timeline(page: Any) -> None:
    page.get_by_label("wish").fill("Soup, please")
    page.get_by_role("button", name="Send").click()

    page.get_by_role("status").filter(has_text="with 1 tool call").wait_for()
    assert "Coming: <i>1 small hot soup" in page.locator("#chat .answer").last.inner_text()
    assert page.get_by_label("wish").input_value() == ""
    rows = page.get_by_role("list", name="Timeline").get_by_role("listitem")
    assert [each.split()[0] for each in rows.all_inner_texts()] == ["ScriptedChatModel", "add", "ScriptedChatModel"]
    row = rows.nth(1)
    assert row.locator("summary .thread").inner_text().startswith("toolbox-pool")
    row.locator("summary").click()
    assert row.get_by_role("group", name="Arguments of add").inner_text() == '{\n  "dish": "soup"\n}'
    assert "1 small hot soup" in row.get_by_role("group", name="Result of add").inner_text()
    assert row.locator(".bar").bounding_box()["width"] > 1
    rows.last.locator("summary").click()
    assert "add: 1 small hot soup" in rows.last.get_by_role("group", name="Sent to").inner_text()


def test_the_page_works_with_the_keyboard_only(page: Any) -> None:
    page.keyboard.press("Tab")
    page.locator(".skip:focus").wait_for()
    assert illegible_texts(page) == []
    page.get_by_label("Memory id").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.get_by_label("Memory id").input_value() == "dev-2"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("pay")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("now")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="with 2 tool calls").wait_for()
    assert page.locator("#chat .said").inner_text() == "pay\nnow"
    assert "failed" in page.locator("#chat .timeline summary").nth(1).inner_text()
    page.locator("#chat .timeline summary").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("group", name="Result of pay").inner_text() == "<b>no change</b>"


def test_a_stream_is_shown_as_it_arrives(page: Any) -> None:
    page.get_by_role("link", name="tell streams").click()
    page.get_by_label("wish").fill("Soup")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Answered").wait_for()
    assert "Coming:" in page.locator("#chat .answer").last.inner_text()
    assert illegible_texts(page) == []

    page.get_by_role("link", name="count streams").click()
    page.get_by_label("wish").fill("numbers")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Answered").wait_for()
    assert page.get_by_role("group", name="Item").all_inner_texts() == ["7", "8"]


def test_an_error_is_shown_and_the_text_is_kept(page: Any) -> None:
    page.get_by_role("link", name="fail str").click()
    page.get_by_label("wish").fill("boom")
    page.keyboard.press("Enter")

    page.locator("#chat p.bad").filter(has_text="RuntimeError: the oven is off").wait_for()
    assert page.get_by_label("wish").input_value() == "boom"
    assert page.get_by_role("button", name="Send").is_enabled()


def test_a_tool_is_called_with_a_form_made_from_its_schema(page: Any) -> None:
    page.get_by_role("link", name="Tools").click()
    page.get_by_label("dish").fill("soup")
    page.get_by_label("count").fill("3")
    page.get_by_label("size").select_option("large")
    page.get_by_label("hot").select_option("false")
    page.get_by_role("button", name="Add item").click()
    page.get_by_label("name").fill("salt")
    page.get_by_label("seat").select_option("string")
    page.locator(".variant textarea").fill("A")
    page.get_by_role("button", name="Call").click()

    page.get_by_role("heading", name="The model reads").wait_for()
    result = page.get_by_role("group", name="Result")
    assert result.inner_text() == "3 large cold soup with 10 g salt for 'A'"


def test_empty_fields_are_not_sent_and_invalid_values_are_reported(page: Any) -> None:
    page.get_by_role("link", name="Tools").click()
    page.get_by_label("dish").fill("soup")
    page.keyboard.press("Control+Enter")
    page.get_by_role("group", name="Result").filter(has_text="1 small hot soup with nothing for None").wait_for()
    assert illegible_texts(page) == []

    page.get_by_label("count").fill("many")
    page.keyboard.press("Control+Enter")
    page.get_by_role("heading", name="The model reads an error").wait_for()
    assert "count" in page.get_by_role("group", name="Result").inner_text()


def test_arguments_can_be_written_as_json(page: Any) -> None:
    page.get_by_role("link", name="Tools").click()
    page.get_by_label("dish").fill("soup")
    page.get_by_role("button", name="As JSON").click()
    text = page.get_by_role("textbox", name="Arguments as JSON")
    assert '"dish": "soup"' in text.input_value()
    text.fill('{"dish": "cake", "count": 2,}')
    page.keyboard.press("Control+Enter")

    page.get_by_role("group", name="Result").filter(has_text="2 small hot cake").wait_for()


def test_beans_are_a_graph_and_a_table(page: Any) -> None:
    page.get_by_role("link", name="Beans").click()
    basket = page.get_by_role("button", name="Basket, request")
    assert "holds kitchen" in basket.get_attribute("aria-label")
    basket.focus()
    page.keyboard.press("Enter")

    assert basket.get_attribute("aria-pressed") == "true"
    assert page.locator("#beans .link.lit").count() == 3
    assert page.locator("#beans tr.lit th").inner_text() == "basket"
    row = page.get_by_role("row").filter(has_text="session")
    assert "looks up Basket" in row.first.inner_text().replace("\n", " ")
    boxes = [box.bounding_box() for box in page.locator("#beans svg .bean").all()]
    left_out = page.locator("#beans .left-out li").inner_text()
    assert left_out == "Delivery: the profile 'prod' is not active (none is)"
    for number, one in enumerate(boxes):
        for other in boxes[number + 1 :]:
            apart = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            assert apart or one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]


def test_the_log_is_live(page: Any, browser: Any, address: str) -> None:
    page.get_by_role("link", name="Log").click()
    page.get_by_role("status").filter(has_text="Live").wait_for()
    other = browser.new_page()
    other.goto(f"{address}?token={quote(TOKEN)}")
    other.get_by_label("wish").fill("Soup from another page")
    other.keyboard.press("Enter")

    run = page.locator(".run").filter(has_text="Soup from another page").first
    run.locator(".mark").filter(has_text="done").wait_for()
    run.locator("> details > summary").click()
    assert illegible_texts(page) == []
    assert "soup" in run.get_by_role("group", name="Answer").inner_text()
    page.get_by_label("Show only").fill("nothing like it")
    assert page.locator(".run:visible").count() == 0
    assert illegible_texts(page) == []
    page.get_by_label("Show only").fill("another PAGE")
    assert run.is_visible()
    other.close()


def test_a_lost_connection_is_shown_and_opened_again(admitted: Any, address: str) -> None:
    page = admitted
    page.route("**/api/log", lambda route: route.fulfill(status=422, body="{}", content_type="application/json"))
    page.goto(address)
    page.get_by_role("link", name="Log").click()
    page.get_by_role("status").filter(has_text="Disconnected").wait_for()
    assert illegible_texts(page) == []

    page.unroute("**/api/log")
    page.get_by_role("status").filter(has_text="Live").wait_for()


def test_a_view_has_an_address(page: Any, address: str) -> None:
    page.goto(f"{address}#tools/pay")
    page.get_by_role("heading", name="pay").wait_for()
    page.get_by_role("link", name="Beans").click()
    page.get_by_role("button", name="Basket, request").wait_for()
    page.go_back()

    page.get_by_role("heading", name="pay").wait_for()
    assert page.get_by_role("link", name="Tools").get_attribute("aria-current") == "page"


def test_a_narrow_screen_does_not_scroll_horizontally(admitted: Any, address: str) -> None:
    page = admitted
    page.set_viewport_size({"width": 320, "height": 800})
    page.goto(address)
    for view in VIEWS:
        page.get_by_role("link", name=view, exact=True).click()
        page.locator(f"#view-{view.lower()}").wait_for()
        fits = page.evaluate("[document.documentElement.scrollWidth <= window.innerWidth, innerWidth]")
        assert (view, *fits) == (view, True, 320)


def test_keyboard_focus_follows_links(page: Any) -> None:
    page.get_by_role("link", name="tell streams").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Waiter.tell").and_(page.locator(":focus")).wait_for()
    page.locator(".chip").filter(has_text="pay").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="pay").and_(page.locator(":focus")).wait_for()

    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    page.locator("main:focus").wait_for()
    assert page.url.endswith("#tools/pay")


def test_escape_stops_the_call_and_marks_running_rows_as_stopped(page: Any) -> None:
    page.get_by_label("wish").fill("wait for it")
    page.keyboard.press("Enter")
    page.locator("#chat .timeline .running .name").filter(has_text="wait").wait_for()
    assert illegible_texts(page) == []
    page.keyboard.press("Escape")

    page.get_by_role("status").filter(has_text="Stopped.").wait_for()
    assert "stopped" in page.locator("#chat .timeline summary").last.inner_text()
    run = page.locator("#log .run").filter(has_text="wait for it").first
    run.locator(".mark").filter(has_text="stopped").wait_for(state="attached")
    assert page.locator("#chat .running").count() == 0
    assert page.get_by_label("wish").evaluate("each => each === document.activeElement")


def test_a_nested_invocation_is_shown_below_the_outer_one(page: Any) -> None:
    page.get_by_role("link", name="manage str").click()
    page.get_by_label("wish").fill("delegate")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="with 2 tool calls").wait_for()
    assert "inside: " in page.locator("#chat .timeline .inner").first.text_content()
    page.get_by_role("link", name="Log").click()

    outer = page.locator(".run").filter(has_text="Host.manage").filter(has_not_text=" in Host.manage").first
    inner = page.locator(".run:not(.inner) + .run.inner").first
    assert "Helper.assist in Host.manage" in inner.locator("summary").first.inner_text()
    apart = inner.locator(".name").first.evaluate("each => parseFloat(getComputedStyle(each).paddingLeft)")
    assert apart > 0
    inner.locator("summary").first.click()
    inner.get_by_role("button", name="Host.manage").click()
    outer.locator("> details[open] > summary:focus").wait_for()


@pytest.mark.parametrize("wrong", ["#chat/%E0", "#constructor", "#__proto__", "#tools/none"])
def test_an_unknown_fragment_shows_a_view(admitted: Any, address: str, wrong: str) -> None:
    admitted.goto(address + wrong)

    admitted.locator("main h2").first.wait_for()
    assert not admitted.get_by_role("alert").is_visible()


def test_objects_of_a_union_have_names_and_items_have_numbers(page: Any, address: str) -> None:
    page.goto(f"{address}#tools/adopt")
    pet = page.get_by_label("pet", exact=True)
    pet.wait_for()
    assert pet.locator("option").all_inner_texts() == ["cat", "object (barks)"]
    page.get_by_role("button", name="Add item").click()
    page.get_by_role("group", name="Item 1").get_by_role("button", name="Add item").click()
    page.get_by_role("button", name="Add item").last.click()
    page.get_by_role("group", name="Item 2").wait_for()
    page.get_by_role("button", name="Remove item 1").last.click()

    page.get_by_role("button", name="Remove item 1").and_(page.locator(":only-of-type")).wait_for()
    assert page.get_by_role("group", name="Item 1").get_by_role("textbox").count() == 0
    assert page.get_by_role("group", name="Item 2").count() == 0


def test_a_very_long_result_can_be_shown_in_full(page: Any, address: str) -> None:
    page.goto(f"{address}#tools/recite")
    page.get_by_role("button", name="Call").click()
    page.get_by_role("button", name="Show all 105,000 characters").click()

    result = page.get_by_role("group", name="Result")
    assert len(result.inner_text()) == 105_000
    assert result.evaluate("each => each === document.activeElement")


def test_a_page_of_an_outdated_program_offers_to_reload(admitted: Any, address: str) -> None:
    page = admitted
    program = page.request.get(f"{address}api/program").json()
    another = {**program, "title": "Another"}
    page.route("**/api/program", lambda route: route.fulfill(json=another), times=1)
    page.route(
        "**/api/log", lambda route: route.fulfill(status=422, body="{}", content_type="application/json"), times=1
    )
    page.goto(address)
    page.locator("#title").filter(has_text="Another").wait_for()
    page.get_by_role("status").filter(has_text="The program has changed").wait_for()
    assert illegible_texts(page) == []
    page.get_by_role("button", name="Reload").click()
    page.locator("#title").filter(has_text="The restaurant").wait_for()


def test_the_token_is_removed_from_the_address_and_kept_for_reloads(admitted: Any, address: str) -> None:
    admitted.context.clear_cookies()
    admitted.goto(f"{address}?token={quote(TOKEN)}#tools/pay")
    admitted.get_by_role("heading", name="pay").wait_for()
    assert admitted.url == f"{address}#tools/pay"
    with admitted.expect_request_finished(lambda asked: asked.url.endswith("api/program")):
        admitted.reload()
    admitted.get_by_role("heading", name="pay").wait_for()
    loaded = "performance.getEntriesByType('resource').map(each => [each.name, each.transferSize > 0])"
    files = dict(admitted.evaluate(loaded))
    assert files.pop(f"{address}api/program")
    assert len(files) > 10
    assert not any(files.values())  # they come from the browser's cache


def test_without_the_token_a_form_asks_for_it(clean_tab: Any, address: str) -> None:
    clean_tab.goto(address)
    assert illegible_texts(clean_tab) == []
    clean_tab.get_by_label("Token").fill("something else")
    with clean_tab.expect_navigation():  # the page that follows looks the same
        clean_tab.get_by_role("button", name="Open").click()
    clean_tab.get_by_text("enter its token").wait_for()
    clean_tab.get_by_label("Token").fill(TOKEN)
    clean_tab.get_by_role("button", name="Open").click()
    clean_tab.get_by_role("heading", name="Waiter.serve").wait_for()


def test_texts_that_are_too_pale_in_one_scheme_are_found(tab: Any) -> None:
    tab.goto("about:blank")
    dark = "@media (prefers-color-scheme: dark) { html { background: #111 } p { color: #444 } }"
    tab.set_content(f"<style>{dark}</style><p>too pale in the dark</p>")

    [found] = illegible_texts(tab)
    assert found.startswith("dark: p: ")


# --- other programs


@pytest.fixture
def address_of_the_desk(serving_on_a_thread: Any) -> Iterator[str]:
    with serving_on_a_thread(desk()) as url:
        yield f"{url}/dev-ui/"


def test_a_person_edits_and_approves_a_call_on_the_page(address_of_the_desk: str, calm_tab: Any) -> None:
    page = calm_tab
    page.goto(address_of_the_desk)
    page.get_by_label("question").fill("refund 7")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("link", name="Open the inbox").click()
    page.get_by_role("textbox", name="Arguments", exact=True).fill('{"order": 8}')
    assert illegible_texts(page) == []
    page.get_by_role("button", name="Approve").click()

    page.locator("#run .outcome").get_by_text("refunded 8").wait_for()
    assert "approve refund" in page.get_by_role("list", name="History").inner_text()
    assert page.get_by_role("button", name="Approve").count() == 0
    assert illegible_texts(page) == []


def test_large_numbers_and_hidden_characters_reach_the_tool_as_they_are(
    address_of_the_desk: str, calm_tab: Any
) -> None:
    page = calm_tab
    page.goto(address_of_the_desk)
    for turn, edited in enumerate((False, True)):
        page.get_by_label("question").fill("note")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("link", name="Open the inbox").nth(turn).click()  # the answer of this turn
        field = page.get_by_role("textbox", name="Arguments", exact=True)
        assert field.input_value() == '{\n  "order": 9007199254740993,\n  "text": "ab\\u202ecd\\u3164\\ufe0f"\n}'
        assert '"text": "abU+202EcdU+3164U+FE0F"' in page.get_by_role("group", name="Arguments of note").inner_text()
        if edited:
            field.fill('{"order": 9007199254740995, "text": "ab\\u202ecd\\u3164\\ufe0f"}')
        page.get_by_role("button", name="Approve").click()
        number = "9007199254740995" if edited else "9007199254740993"
        page.locator("#run .outcome").get_by_text(f"noted {number} abU+202EcdU+3164U+FE0F").wait_for()
        assert not {"\u202e", "\u3164", "\ufe0f"} & set(page.locator("body").inner_text())
        page.get_by_role("link", name="Chat").click()


class KnownOrder(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        return self.success()


class Orders:
    @tool(requires_approval=True)
    @roles_allowed("support", "admin")
    @tool_input_guardrails(KnownOrder)
    def refund(self, order: int) -> str: ...

    @tool
    @authenticated
    def my_orders(self) -> str: ...

    @tool
    def opening_hours(self) -> str: ...

    @tool
    @roles_allowed()
    def never(self) -> str: ...


@register_ai_service(tools=Orders)
class Expert(Protocol):
    @tool
    @roles_allowed("boss")
    async def consult(self, text: str) -> str: ...


@register_ai_service(tools=Expert)
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...


def shop() -> FastAPI:
    app = FastAPI(title="The <b>shop</b>")
    install(
        app,
        Container(models={"default": ScriptedChatModel([])}).register(Desk, Expert),
        dev_ui=DevUi(token=False),
        identity=nobody,
    )

    @app.post("/chat")
    async def chat(desk: Inject[Desk]) -> None: ...

    return app


def nobody() -> SecurityIdentity | None:
    return None


@pytest.fixture
def address_of_the_shop(serving_on_a_thread: Any) -> Iterator[str]:
    with serving_on_a_thread(shop()) as url:
        yield f"{url}/dev-ui/"


def test_the_reach_is_a_table_that_says_who_may_call_what(address_of_the_shop: str, calm_tab: Any) -> None:
    page = calm_tab
    page.set_viewport_size({"width": 320, "height": 800})
    page.goto(f"{address_of_the_shop}#reach")
    table = page.get_by_role("region", name="Table of the reach")
    table.get_by_role("row").first.wait_for()

    [head, *rows] = [
        [cell.inner_text() for cell in row.locator("th, td").all()] for row in table.get_by_role("row").all()
    ]
    assert [each.lower() for each in head] == ["entry", "through", "tool", "roles", "approval", "guardrails", "effects"]
    through = ["POST /chat", "Desk.chat → Expert.consult"]
    assert [row for row in rows if row[0] == "POST /chat"] == [
        ["POST /chat", "Desk.chat", "consult", "boss", "", "", ""],
        [*through, "refund", "boss, and admin or support", "yes", "KnownOrder", ""],
        [*through, "my_orders", "boss", "", "", ""],
        [*through, "opening_hours", "boss", "", "", ""],
    ]
    assert not [row for row in rows if row[2] == "never"]  # no identity may call it
    assert page.get_by_role("link", name="Reach").get_attribute("aria-current") == "page"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    page.get_by_role("link", name="Chat").click()
    page.locator("#view-chat").wait_for()
    page.get_by_role("link", name="Reach").click()
    page.locator("#view-reach").wait_for()
    assert table.count() == 1  # made once
    assert illegible_texts(page) == []
