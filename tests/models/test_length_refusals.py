"""A request that is too long is a `ContextLengthError`, whatever server refuses it, and no other model is asked."""

import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from pydantic_ai import exceptions as theirs
from pydantic_ai.models.function import FunctionModel

from tests.models import messages_api
from tests.models.every_wire import Connect
from tests.models.scripted_server import HI, Scripted, Serve, chunk, stream
from toolbox import (
    Container,
    ContextLengthError,
    ModelHttpError,
    OpenAiChatModel,
    PydanticAiChatModel,
    register_ai_service,
)
from toolbox.models import fallback
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


def openai(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


LIMIT = "This model's maximum context length is 128000 tokens. However, your messages resulted in 130000 tokens."
TOO_LONG = {"type": "invalid_request_error", "message": "prompt is too long: 213462 tokens > 200000 maximum"}
SEEN = json.loads((Path(__file__).parent / "seen_replies" / "refusals.json").read_text("utf-8"))
"""What servers of these names answered: to requests that were too long, and others that speak of lengths."""


def scripted_refusal(status: int, body: object) -> Scripted:
    said = body if isinstance(body, str) else json.dumps(body)
    return Scripted(said.encode(), status=status, content_type="text/html" if said[:1] == "<" else "application/json")


async def error_of(serve: Serve, refusal: Scripted, streamed: bool = False) -> ModelHttpError:
    server = await serve([refusal])
    model = OpenAiChatModel("m", server.url, "test", max_retries=0)
    with pytest.raises(ModelHttpError) as caught:
        _ = [each async for each in model.stream(HI)] if streamed else await model.chat(HI)
    await model.aclose()
    return caught.value


@pytest.mark.parametrize("seen", SEEN["too_long"], ids=lambda seen: seen["from"])
async def test_a_request_that_is_too_long_has_its_own_error(serve: Serve, seen: dict[str, Any]) -> None:
    error = await error_of(serve, scripted_refusal(seen["status"], seen["body"]))

    assert type(error) is ContextLengthError
    assert (error.status, error.request_id) == (seen["status"], "req_1")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args) == (ContextLengthError, error.args)


@pytest.mark.parametrize("seen", SEEN["others"], ids=lambda seen: seen["from"])
async def test_other_refusals_have_not(serve: Serve, seen: dict[str, Any]) -> None:
    error = await error_of(serve, scripted_refusal(seen["status"], seen["body"]))

    assert (type(error), error.status) == (ModelHttpError, seen["status"])


async def test_such_a_refusal_inside_a_reply_has_the_status_of_a_refusal(serve: Serve) -> None:
    body = openai(LIMIT, "context_length_exceeded")

    whole = await error_of(serve, scripted_refusal(200, body))
    streamed = await error_of(serve, stream(chunk({"content": ""}), body), streamed=True)

    for error in (whole, streamed):
        assert (type(error), error.status) == (ContextLengthError, 400)


async def test_every_wire_reads_such_a_refusal(serve: Serve, connect: Connect) -> None:
    failed = {"status": "failed", "error": {"code": "context_length_exceeded", "message": "Too long."}}
    replies = {
        "responses": scripted_refusal(200, failed),
        "anthropic": messages_api.events({"type": "error", "error": TOO_LONG}),
        "bridge": scripted_refusal(400, openai("Too long.", "context_length_exceeded")),
    }
    for wire, reply in replies.items():
        with pytest.raises(ContextLengthError) as caught:
            _ = [each async for each in connect(wire, await serve([reply])).stream(HI)]

        assert caught.value.status == 400


async def test_pydantic_ai_says_it_for_providers_with_packages_of_their_own() -> None:
    failure = theirs.ModelHTTPError(
        400, "m", {"Error": {"Message": "Input is too long for requested model.", "Code": "x"}}
    )

    def refuse(*_: object) -> Any:
        raise failure

    with pytest.raises(ContextLengthError):
        await PydanticAiChatModel(FunctionModel(refuse)).chat(HI)


@register_ai_service
class Desk(Protocol):
    async def ask(self, text: str) -> str: ...
    def stream(self, text: str) -> AsyncIterator[str]: ...

    @fallback(ask)
    @staticmethod
    def offline(text: str) -> str:
        return "offline"


async def test_neither_another_model_nor_a_fallback_answers_it(serve: Serve) -> None:
    server = await serve(lambda _: scripted_refusal(400, openai(LIMIT)))
    second = ScriptedChatModel(["second"] * 2)
    model = OpenAiChatModel("m", server.url, "test", fallback=["second"])
    async with Container(models={"default": model, "second": second}).register(Desk) as container:
        desk = container.get(Desk)
        with pytest.raises(ContextLengthError):
            await desk.ask("x")
        with pytest.raises(ContextLengthError):
            _ = [each async for each in desk.stream("x")]
    await model.aclose()

    assert (second.requests, len(server.requests)) == ([], 2)
