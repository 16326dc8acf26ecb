"""Hand-over together with other capabilities."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from tests.conversations.three_methods import ThreeMethods
from toolbox import (
    AiMessage,
    AiServiceTool,
    ChatMemoryStore,
    ChatRequest,
    Container,
    HandedOver,
    InvocationContext,
    MemoryId,
    Result,
    ReturnBehavior,
    TokenStream,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSpecification,
    UnknownToolError,
    application_scoped,
    create_ai_service,
    decorates,
    register_ai_service,
    return_to_model,
    sql,
    tool,
    toolbox,
)
from toolbox.handover import hands_over_to
from toolbox.limits import UsageLimits
from toolbox.models import ModelRouter
from toolbox.runs import approve
from toolbox.search import KeywordToolSearch
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox.settings import SqlSettings, ToolboxSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

TO_BILLING, TO_DESK = tool_call("transfer_to_billing", {}), tool_call("transfer_to_desk", {})


def started(model: ScriptedChatModel, *classes: Any) -> Container:
    return Container(models={"default": model}).register(*classes)


@tool(return_behavior=ReturnBehavior.IMMEDIATE)
def show() -> str:
    """Show something."""
    return "shown"


@tool
async def look(at: str) -> str:
    """Look at something."""
    return f"seen {at}"


@tool(requires_approval=True)
def approved() -> str:
    """Do something."""
    return "done"


@register_ai_service(tools=look)
class Billing(Protocol):
    """Invoices."""

    @hands_over_to("Desk.chat")
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(tools=[look, show], concurrent_tools=True)
class Desk(Protocol):
    """Everything else."""

    @hands_over_to(Billing.chat)
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


async def test_a_reply_with_a_hand_over_does_not_end_by_an_immediate_tool() -> None:
    both = AiMessage(tool_execution_requests=[tool_call("show", {}), TO_BILLING])
    async with started(ScriptedChatModel([both, "Billing."]), Desk, Billing) as container:
        result = await container.get(Desk).chat("ada", "Hi")
    assert (result.content, result.answered_by) == ("Billing.", "Billing.chat")
    assert [each.result for each in result.tool_executions] == ["shown", "Handed over to Billing.chat."]


async def test_calls_of_one_conversation_wait_for_each_other_beside_a_hand_over() -> None:
    def answer(request: Any) -> Any:
        return TO_BILLING if len(request.tool_specifications) == 3 else "Billing."

    model = ScriptedChatModel([answer] * 4)
    async with started(model, Desk, Billing) as container:
        desk = container.get(Desk)
        results = await asyncio.gather(*(desk.chat("ada", f"message {number}") for number in range(3)))
        assert [each.answered_by for each in results] == ["Billing.chat"] * 3
        assert [len(each.tool_executions) for each in results] == [1, 0, 0]
        assert len(await container.conversations.of(Desk, "ada").history()) == 8


async def test_a_hand_over_alone_keeps_no_unfinished_turn() -> None:
    model = ScriptedChatModel(
        [TO_BILLING, ValueError("broken"), TO_BILLING, tool_call("look", {"at": "it"}), ValueError]
    )
    async with started(model, Desk, Billing) as container:
        desk, room = container.get(Desk), container.conversations.of(Desk, "ada")
        with pytest.raises(ValueError, match="broken"):
            await desk.chat("ada", "Hi")
        assert await room.history() == []
        with pytest.raises(ValueError):
            await desk.chat("ada", "Hi")
        assert {each.state for each in await room.history()} == {"failed"}
        assert (await room.info()).in_charge == "Billing.chat"
        assert [each.answered_by for each in await room.history()] == [None] * 5


async def test_a_stream_with_concurrent_tools_starts_the_others_early() -> None:
    @register_ai_service(tools=look)
    class Books(Protocol):
        """Books."""

        def chat(self, text: str) -> TokenStream: ...

    @register_ai_service(tools=look, concurrent_tools=True)
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        def chat(self, text: str) -> TokenStream: ...

    calls = [tool_call("transfer_to_books", {}), tool_call("look", {"at": "a"}), tool_call("look", {"at": "b"})]
    model = ScriptedChatModel([AiMessage(tool_execution_requests=calls), "Books."])
    async with started(model, Shop, Books) as container:
        events = [each async for each in container.get(Shop).chat("Hi")]
    assert sum(isinstance(each, HandedOver) for each in events) == 1
    assert [each.text for each in model.requests[1].messages[-3:] if each.text] == [
        "Handed over to Books.chat.",
        "seen a",
        "seen b",
    ]


async def test_text_streams_and_streams_of_items_are_handed_over() -> None:
    @register_ai_service
    class Books(Protocol):
        """Books."""

        def texts(self, text: str) -> AsyncIterator[str]: ...
        def items(self, text: str) -> AsyncIterator[int]: ...

    @register_ai_service
    class Shop(Protocol):
        @hands_over_to(Books.texts)
        def texts(self, text: str) -> AsyncIterator[str]: ...

        @hands_over_to(Books.items)
        def items(self, text: str) -> AsyncIterator[int]: ...

    to_books = tool_call("transfer_to_books", {})
    async with started(ScriptedChatModel([to_books, "Books.", to_books, "[1, 2]"]), Shop, Books) as container:
        shop = container.get(Shop)
        assert "".join([each async for each in shop.texts("Hi")]) == "Books."
        assert [each async for each in shop.items("Hi")] == [1, 2]


async def test_an_answer_at_a_limit_of_the_entry_comes_from_the_target() -> None:
    @register_ai_service(tools=look)
    class Books(Protocol):
        """Books."""

        async def chat(self, text: str) -> Result[str]: ...

    @register_ai_service(max_tool_rounds=1, on_limit="answer")
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        async def chat(self, text: str) -> Result[str]: ...

    replies: list[Any] = [tool_call("transfer_to_books", {}), tool_call("look", {"at": "a"}), "So be it."]
    async with started(ScriptedChatModel(replies), Shop, Books) as container:
        result = await container.get(Shop).chat("Hi")
    assert (result.content, result.stopped_by, result.answered_by) == ("So be it.", "max_tool_rounds", "Books.chat")


async def test_a_tool_search_of_the_target_leaves_its_hand_over_visible() -> None:
    @register_ai_service(tools=[look, show], tool_search=KeywordToolSearch())
    class Books(Protocol):
        """Books."""

        @hands_over_to("Shop.chat")
        async def chat(self, text: str) -> Result[str]: ...

    @register_ai_service
    class Shop(Protocol):
        """Shop."""

        @hands_over_to(Books.chat)
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("transfer_to_books", {}), tool_call("transfer_to_shop", {}), "Shop."])
    async with started(model, Shop, Books) as container:
        assert (await container.get(Shop).chat("Hi")).answered_by == "Shop.chat"
    names = {each.name for each in model.requests[1].tool_specifications}
    assert "transfer_to_shop" in names
    assert "look" not in names


async def test_a_provider_of_the_target_adds_a_tool_that_waits_for_approval() -> None:
    ran: list[str] = []

    class Provider:
        def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
            def pay(*_: object) -> str:
                ran.append("pay")
                return "paid"

            return ToolProviderResult([AiServiceTool(ToolSpecification("pay", "Pay."), pay, requires_approval=True)])

    @register_ai_service(tool_provider=Provider)
    class Books(Protocol):
        """Books."""

        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("transfer_to_books", {}), tool_call("pay", {}), "Paid."])
    async with started(model, Shop, Books, Provider) as container:
        waiting = await container.get(Shop).chat("ada", "Hi")
        assert [each.tool_name for each in waiting.pending] == ["pay"]
        result = await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
        assert (result.content, result.answered_by) == ("Paid.", "Books.chat")
    assert ran == ["pay"]


async def test_a_service_that_is_a_tool_hands_over_and_waits() -> None:
    @tool(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    @register_ai_service(tools=pay)
    class Books(Protocol):
        """Books."""

        async def chat(self, text: str) -> str: ...

    @register_ai_service
    class Shop(Protocol):
        @tool("Ask the shop")
        @hands_over_to(Books.chat)
        async def chat(self, text: str) -> str: ...

    @register_ai_service(tools=Shop)
    class Boss(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel(
        {
            Boss: [tool_call("chat", {"text": "Buy it"}), "Bought."],
            Shop: [tool_call("transfer_to_books", {})],
            Books: [tool_call("pay", {}), "Paid."],
        }
    )
    async with started(model, Boss, Shop, Books) as container:
        waiting = await container.get(Boss).ask("Hi")
        [call] = waiting.pending
        result = await container.runs.resume(waiting.run_id or "", {call.id: approve()})
        assert result.content == "Bought."
        assert [each.result for each in result.tool_executions] == ["Paid."]


def test_methods_of_a_service_without_a_container_hand_over() -> None:
    class Shop(Protocol):
        @hands_over_to("Shop.books", description="books")
        def chat(self, text: str) -> Result[str]: ...

        @toolbox(look)
        def books(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("transfer_to_shop", {}), "Books."])
    shop = create_ai_service(Shop, chat_model=model)
    assert shop.chat("Hi").answered_by == "Shop.books"


async def test_the_error_handlers_are_those_of_the_target() -> None:
    @register_ai_service(on_unknown_tool=return_to_model)
    class Books(Protocol):
        """Books."""

        async def chat(self, text: str) -> str: ...

    @register_ai_service
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("transfer_to_books", {}), tool_call("made_up", {}), "Books."])
    async with started(model, Shop, Books) as container:
        assert await container.get(Shop).chat("Hi") == "Books."


async def test_a_hand_over_counts_as_a_tool_call_in_limits() -> None:
    @register_ai_service(limits=UsageLimits(tool_calls=1), on_limit="answer", tools=look)
    class Shop(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("look", {"at": "it"}), TO_BILLING, "Here."])
    async with started(model, Shop, Billing, Desk) as container:
        result = await container.get(Shop).chat("ada", "Hi")
    assert (result.stopped_by, result.answered_by) == ("tool_calls", "Shop.chat")


async def test_a_database_keeps_who_is_in_charge(tmp_path: Any) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{tmp_path}/chats.db"))
    scripts: list[list[Any]] = [[TO_BILLING, "Billing."], ["Billing."]]
    for replies in scripts:
        container = Container(models={"default": ScriptedChatModel(replies)}, settings=settings)
        async with container.register(Desk, Billing, sql.engine, sql.SqlChatMemoryStore):
            assert (await container.get(Desk).chat("ada", "Hi")).answered_by == "Billing.chat"
            room = container.conversations.of(Desk, "ada")
            [listed] = await container.conversations.list()
            assert listed.in_charge == "Billing.chat"
    container = Container(models={"default": ScriptedChatModel([TO_BILLING, "Billing."])}, settings=settings)
    async with container.register(Desk, Billing, sql.engine, sql.SqlChatMemoryStore):
        room = container.conversations.of(Desk, "ada")
        await room.put_in_charge(Desk.chat)
        log = await room.history()
        assert [each.answered_by for each in log if each.answered_by] == ["Billing.chat", "Billing.chat"]
        await container.get(Desk).chat("ada", "Hi")
        asked = [each for each in await room.history() if type(each.message).__name__ == "UserMessage"]
        await room.rewind(asked[2])
        assert (await room.info()).in_charge == "Desk.chat"
        await room.rewind(asked[1])
        assert (await room.info()).in_charge == "Billing.chat"
        await room.rewind(asked[0])
        assert (await room.info()).in_charge is None


async def test_a_text_before_a_hand_over_is_sent_and_stored() -> None:
    model = ScriptedChatModel([AiMessage("One moment.", [TO_BILLING]), "Billing."])
    async with started(model, Desk, Billing) as container:
        await container.get(Desk).chat("ada", "Hi")
        log = await container.conversations.of(Desk, "ada").history()
    assert [each.message.text for each in log] == ["Hi", "One moment.", "Handed over to Billing.chat.", "Billing."]


async def test_routers_of_both_choose_once() -> None:
    @application_scoped
    class Sizes(ModelRouter):
        names = ("small", "large")

        def __init__(self) -> None:
            self.asked: list[int] = []

        def choose(self, request: ChatRequest, context: InvocationContext) -> str:
            self.asked.append(len(request.tool_specifications))
            return "large" if context.service.__name__ == "Books" else "small"

    @register_ai_service(model=Sizes, tools=approved)
    class Books(Protocol):
        """Books."""

        async def chat(self, text: str) -> Result[str]: ...

    @register_ai_service(model=Sizes)
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        async def chat(self, text: str) -> Result[str]: ...

    small = ScriptedChatModel([tool_call("transfer_to_books", {})])
    large = ScriptedChatModel([tool_call("approved", {}), "Books."])
    container = Container(models={"small": small, "large": large}).register(Shop, Books, Sizes)
    async with container:
        waiting = await container.get(Shop).chat("Hi")
        result = await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
        assert result.content == "Books."
        assert container.get(Sizes).asked == [1, 1]


async def test_a_decorator_of_the_target_is_not_called() -> None:
    @register_ai_service
    class Books(Protocol):
        """Books."""

        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @decorates(Books)
    class Loud:
        def __init__(self, inner: Books) -> None:
            self.inner = inner

        async def chat(self, room: str, text: str) -> Result[str]:
            raise AssertionError("not called")

    @register_ai_service
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("transfer_to_books", {}), "Books."])
    async with started(model, Shop, Books, Loud) as container:
        assert (await container.get(Shop).chat("ada", "Hi")).content == "Books."


async def test_tools_that_a_colleague_gets_during_a_call_are_imitated_too() -> None:
    """Those of a provider and of a tool search: no plan knows them, but the conversation shows who called them."""

    @tool(name="remote")
    async def found_later() -> str:
        """Look elsewhere."""
        return "seen"

    @register_ai_service
    class Books(Protocol):
        """Books."""

        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service(tool_provider=lambda request: [found_later], tools=look, tool_search=KeywordToolSearch())
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    search, remote = tool_call("tool_search_tool", {"terms": ["elsewhere"]}), tool_call("remote", {})
    to_books = tool_call("transfer_to_books", {})
    beside = AiMessage(tool_execution_requests=[remote, to_books])
    replies = [search, beside, remote, search, "One.", remote, "Two.", tool_call("made_up", {})]
    async with started(ScriptedChatModel(replies), Shop, Books) as container:
        first = await container.get(Shop).chat("ada", "Hi")
        assert [each.result for each in first.tool_executions[1:]] == [
            *("seen", "Handed over to Books.chat."),
            "You do not have the tool 'remote' now; Shop.chat has it.",
            "You do not have the tool 'tool_search_tool' now; Shop.chat has it.",
        ]
        second = await container.get(Shop).chat("ada", "Again")  # Books is in charge from the start
        assert second.tool_executions[0].result == "You do not have the tool 'remote' now; Shop.chat has it."
        with pytest.raises(UnknownToolError):
            await container.get(Shop).chat("ada", "Again")


async def test_a_colleague_that_the_identity_may_not_call_is_not_named() -> None:
    @register_ai_service(tools=look)
    class Books(Protocol):
        """Books."""

        @roles_allowed("librarian")
        async def chat(self, text: str) -> str: ...

    @register_ai_service
    class Shop(Protocol):
        @hands_over_to(Books.chat)
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("look", {"at": "it"}), tool_call("look", {"at": "it"}), "Shop."])
    program = Container(models={"default": model}, seeds=[SecurityIdentity]).register(Shop, Books)
    async with program as container:
        async with container.request_scope({SecurityIdentity: SecurityIdentity("bob", {"guest"})}):
            with pytest.raises(UnknownToolError):
                await container.get(Shop).chat("Hi")
        async with container.request_scope({SecurityIdentity: SecurityIdentity("ann", {"librarian"})}):
            assert await container.get(Shop).chat("Hi") == "Shop."


async def test_a_forced_choice_of_a_hand_over_is_for_the_first_request() -> None:
    @register_ai_service(tool_choice="transfer_to_billing")
    class Shop(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([TO_BILLING, "Billing."])
    async with started(model, Shop, Billing, Desk) as container:
        assert (await container.get(Shop).chat("ada", "Hi")).answered_by == "Billing.chat"
    assert [each.tool_choice for each in model.requests] == ["transfer_to_billing", None]


async def test_in_a_store_that_keeps_no_log_the_hand_over_ends_with_the_call() -> None:
    model = ScriptedChatModel([TO_BILLING, "Billing.", "Desk."])
    container = started(model, Desk, Billing).register_instance(ThreeMethods(), ChatMemoryStore)
    async with container:
        assert (await container.get(Desk).chat("ada", "Hi")).answered_by == "Billing.chat"
        assert (await container.get(Desk).chat("ada", "Hi")).answered_by == "Desk.chat"
    assert len(model.requests[2].messages) == 5


async def test_where_no_turn_is_kept_the_hand_over_ends_with_the_call() -> None:
    @register_ai_service(chat_memory=None)
    class Shop(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([TO_BILLING, "Billing.", "Shop."])
    async with started(model, Shop, Billing, Desk) as container:
        assert (await container.get(Shop).chat("ada", "Hi")).answered_by == "Billing.chat"
        assert (await container.get(Shop).chat("ada", "Hi")).answered_by == "Shop.chat"
