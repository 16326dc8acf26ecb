"""Tests the ready-made guardrails: lengths, secrets, and OpenAI's moderation endpoint on a real local server."""

import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from tests.models.scripted_server import Scripted, Serve, call, completion
from toolbox import (
    AudioContent,
    Container,
    IllegalConfigurationError,
    ImageContent,
    ModelConnectionError,
    ModelHttpError,
    ModelProtocolError,
    OpenAiChatModel,
    PdfContent,
    Result,
    TextContent,
    ToolExecution,
    ToolExecutionResult,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.guardrails import (
    InputGuardrailError,
    MaskSecrets,
    MaxLength,
    Moderated,
    OutputGuardrailError,
    ToolGuardrailError,
    input_guardrails,
    masked,
    output_guardrails,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def ask(self, question: str) -> Result[str]: ...


async def called(function: Any, arguments: Any) -> ToolExecution:
    model = ScriptedChatModel([tool_call(function.__name__, arguments), "done"])
    result = await create_ai_service(Assistant, chat_model=model, tools=[function]).ask("x")
    return result.tool_executions[0]


# --- MaxLength


async def test_longer_messages_are_refused_and_longer_answers_are_cut() -> None:
    @register_ai_service
    @input_guardrails(MaxLength(5))
    @output_guardrails(MaxLength(3))
    class Short(Protocol):
        async def ask(self, text: str) -> str: ...

    short = create_ai_service(Short, chat_model=ScriptedChatModel(["abc", "abcd"]))
    assert await short.ask("12345") == "abc"
    assert await short.ask("12345") == "abc"
    with pytest.raises(InputGuardrailError) as caught:
        await short.ask("123456")
    assert caught.value.failures == ((MaxLength, "The message has 6 characters; the limit is 5."),)


async def test_longer_arguments_are_refused_and_longer_results_are_cut() -> None:
    @tool
    @tool_input_guardrails(MaxLength(6))
    @tool_output_guardrails(MaxLength(8))
    def join(words: list[str], end: str = "", n: int = 10_000_000) -> str:
        return "-".join(words) * 3 + end

    assert (await called(join, {"words": ["abc", "def"]})).result == "abc-defa"
    refused = await called(join, {"words": ["abc", "def"], "end": "!"})
    assert refused.is_error
    assert refused.result == "Input validation failed: The arguments have 7 characters together; the limit is 6."


async def test_contents_are_cut_with_the_text() -> None:
    @tool
    @tool_output_guardrails(MaxLength(4))
    def draw() -> list[Any]:
        return [TextContent("abc"), ImageContent(data=b"x", mime_type="image/png"), TextContent("def")]

    model = ScriptedChatModel([tool_call("draw"), "done"])
    await create_ai_service(Assistant, chat_model=model, tools=[draw]).ask("x")
    message: Any = model.requests[-1].messages[-1]
    assert message.text == "abc\n"
    assert message.contents == (TextContent("abc"), ImageContent(data=b"x", mime_type="image/png"))


@pytest.mark.parametrize("chars", [0, -1, True, "5", 2.5])
def test_an_invalid_limit_is_refused(chars: Any) -> None:
    with pytest.raises(ValueError, match="use 1 or more characters"):
        MaxLength(chars)


# --- MaskSecrets

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("password=hunter2", "password=***"),
        ("the password: 'hunter 2', ok", "the password: '***', ok"),
        ("DB_PASSWORD=abc;user=ada", "DB_PASSWORD=***;user=ada"),
        ("api_key = sk-proj-abcdefghijklmnop1234", "api_key = ***"),
        ("key sk-ant-api03-abcdefghijklmnop", "key ***"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: ***"),
        ("curl -H 'Bearer abcdefghijkl'", "curl -H 'Bearer ***'"),
        ("postgres://ada:s3cret@db/shop", "postgres://ada:***@db/shop"),
        ("token ghp_abcdefghijklmnopqrstuvwxyz012345", "token ***"),
        ("AKIAIOSFODNN7EXAMPLE is the id", "*** is the id"),
        (JWT, "***"),
        ("the password is hunter2", "the password is ***"),
        ("card 4111 1111 1111 1111, please", "card ***, please"),
        ("card 4111-1111-1111-1111", "card ***"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nafter", "***\nafter"),
        ("Your PIN is 4711.", "Your PIN is ***"),
        ("export DB_PASS=hunter2", "export DB_PASS=***"),
        ("Cookie: session=abcdef; theme=dark\nHost: shop", "Cookie: ***\nHost: shop"),
        ("Set-Cookie: sid=abc; Path=/", "Set-Cookie: ***"),
        ("\u017fecret=hunter2 and \u0130 api_\u212aey: abc", "\u017fecret=*** and \u0130 api_\u212aey: ***"),
    ],
)
def test_secrets_in_text_are_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "the weather in Rome is fine",
        "order 1234567890123456 was shipped",  # not a card: the check digit is wrong
        "tracking 00340434161094042557",
        "the password is required",
        "passwords must have 12 characters",
        "tokens: 1500 in, 200 out",
        "shipping to Berlin",
        "https://example.com:8080/path",
        "2026-11-22T10:00:00+00:00",
        "Cookie: a small sweet",
        "tests: 3 pass: 2 fail, boarding pass: 12A",
        '{"pass": 3, "boardingPass": "12A"}',
        '{"total_tokens": 100, "city": "Rome", "price": 1.50, "big": 12345678901234567890123}',
        "",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert masked(text) == text


SECRET_NAMES = (
    *("password", "PASSWD", "passphrase", "Passcode", "pwd", "secret", "credential", "credentials", "Authorization"),
    *("api_key", "ApiKey", "api key", "access-key", "private_key", "SIGNING_KEY", "encryption key", "client_key"),
    *("account_key", "auth_key", "master key", "shared_key", "SubscriptionKey", "ssh_key", "service-key"),
    *("token", "access_token", "db_pass", "DatabasePass", "user_pass", "SMTP_PASS", "mail_pass", "ftp_pass"),
    *("ssh_pass", "login_pass", "adminPass", "root-pass", "proxy_pass", "mysql_pass", "postgres_pass", "pg_pass"),
    *("redis_pass", "x-api-key", "MY_SECRET_TEXT"),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_values_with_a_secret_name_are_masked(name: str) -> None:
    assert masked(f"say {name} = abc, {name}:abc") == f"say {name} = ***, {name}:***"
    assert masked(f"the {name}='a b'") == f"the {name}='***'"
    assert json.loads(masked(json.dumps({"x": {name: "abc"}, "y": "abc"}))) == {"x": {name: "***"}, "y": "abc"}


SECRETS_BY_FORMAT = (
    *("sk-abcdefghijklmnop", "sk_live_abcdefghijklmnop", "rk-abcdefghijklmnop", "rk_abcdefghijklmnop"),
    *("pk-abcdefghijklmnop", "pk_abcdefghijklmnop", "ghp_abcdefghij", "gho_abcdefghij", "ghu_abcdefghij"),
    *("ghs_abcdefghij", "ghr_abcdefghij", "github_pat_abcdefghij", "glpat-abcdefghij", "npm_abcdefghij"),
    *("hf_abcdefghij", "pypi-abcdefghij", "dop_v1_abcdefghij", "shpat_abcdefghij", "xoxb-abcdefghij"),
    *("xapp-abcdefghij", "AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "AROAIOSFODNN7EXAMPLE"),
    *("AIDAIOSFODNN7EXAMPLE", "AIza" + "a" * 35, "ya29." + "a" * 20, "SG." + "a" * 16 + "." + "b" * 16),
)


@pytest.mark.parametrize("secret", SECRETS_BY_FORMAT)
def test_secrets_of_a_known_format_are_masked(secret: str) -> None:
    assert masked(f"see {secret}, and {secret}") == "see ***, and ***"
    assert masked(f"see my{secret}") == f"see my{secret}"  # the middle of another word


def test_json_stays_valid_and_numbers_stay_as_written() -> None:
    text = json.dumps(
        {
            "user": "ada",
            "password": 'with "quotes"',
            "apiKey": "x",
            "access_token": "y",
            "userPin": 1234,
            "nested": [{"client-secret": {"value": "z", "of": ["a", 1, None, True]}}],
            "note": "my password is hunter2",
            "card": 4111111111111111,
            "tokens": 12,
            "token": "abc",
            "empty": {"password": ""},
        }
    ).replace('"tokens": 12', '"tokens": 12.50')
    hidden = masked(text)
    assert '"tokens":12.50' in hidden
    assert json.loads(hidden) == {
        "user": "ada",
        "password": "***",
        "apiKey": "***",
        "access_token": "***",
        "userPin": "***",
        "nested": [{"client-secret": {"value": "***", "of": ["***", "***", None, True]}}],
        "note": "my password is ***",
        "card": "***",
        "tokens": 12.5,
        "token": "***",
        "empty": {"password": ""},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"password":"hunter2","password":""}', {"password": ""}),
        ('{"rows":[{"token":"abc","token":null,"id":1.50}]}', {"rows": [{"token": None, "id": 1.5}]}),
        ('{"secret":{"a":"hunter2","a":""}}', {"secret": {"a": ""}}),
        ('{"note":"the password is hunter2!","note":"ok"}', {"note": "ok"}),
    ],
)
def test_secrets_behind_a_repeated_name_are_removed(text: str, expected: object) -> None:
    hidden = masked(text)
    assert json.loads(hidden) == expected
    assert "hunter2" not in hidden
    assert "abc" not in hidden


async def test_the_result_object_is_dropped_and_contents_and_attributes_are_masked() -> None:
    @tool
    @tool_output_guardrails(MaskSecrets)
    def settings() -> ToolExecutionResult:
        return ToolExecutionResult(
            "password=a1",
            {"password": "a1"},
            attributes={"password": "a1", "kept": 1},
            contents=[TextContent("password=a1"), ImageContent(data=b"x", mime_type="image/png")],
        )

    done = await called(settings, {})
    assert (done.result, done.result_object) == ("password=***", None)
    assert done.attributes == {"password": "***", "kept": 1}

    @tool
    @tool_output_guardrails(MaskSecrets)
    def plain() -> dict[str, int]:
        return {"count": 1}

    done = await called(plain, {})
    assert (done.result, done.result_object) == ('{"count":1}', None)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000,
        "password" * 20_000,
        "password=" * 20_000,
        "eyJ" * 60_000,
        "1 " * 90_000,
        "-----BEGIN PRIVATE KEY-----" * 5_000,
        "://a:" * 30_000,
        "bearer " * 20_000,
        "token is " * 20_000,
        '{"a":' * 30_000,
        "[" * 100_000,
        "sk-" * 50_000,
    ],
    ids=lambda text: text[:12],
)
def test_long_and_hostile_texts_are_masked_in_linear_time(text: str) -> None:
    began = time.process_time()
    masked(text)
    assert time.process_time() - began < 5


# --- Moderated


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with Serve() as serving:
        yield serving


def verdict(**categories: bool) -> Scripted:
    flagged = any(categories.values())
    body = {"id": "modr-1", "model": "omni", "results": [{"flagged": flagged, "categories": categories}]}
    return Scripted(json.dumps(body).encode())


@register_ai_service
@input_guardrails(Moderated())
class Desk(Protocol):
    async def ask(self, text: str) -> str: ...


async def test_a_message_is_sent_to_the_moderation_endpoint_with_the_key_of_the_default_model(serve: Serve) -> None:
    server = await serve(
        [
            verdict(violence=False),
            completion({"role": "assistant", "content": "hello"}),
            verdict(violence=True, hate=False),
        ]
    )
    model = OpenAiChatModel("gpt", server.url, "sk-of-the-model", max_retries=0)
    async with Container(models={"default": model}).register(Desk) as container:
        assert await container.get(Desk).ask("hi") == "hello"
        with pytest.raises(InputGuardrailError) as caught:
            await container.get(Desk).ask("I will hurt you")
    await model.aclose()

    assert server.paths == ["/v1/moderations", "/v1/chat/completions", "/v1/moderations"]
    assert server.requests[0] == {"model": "omni-moderation-latest", "input": "hi"}
    assert server.headers[0]["authorization"] == "Bearer sk-of-the-model"
    assert caught.value.failures == ((Moderated, "flagged by moderation: violence"),)


async def test_answers_and_tools_can_be_moderated_too(serve: Serve) -> None:
    moderated = Moderated("text-moderation")

    @tool
    @tool_input_guardrails(moderated)
    @tool_output_guardrails(moderated)
    def shout(text: str) -> str:
        return text.upper()

    @register_ai_service(tools=[shout])
    @output_guardrails(moderated)
    class Loud(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    def reply(body: dict[str, Any]) -> Scripted:
        if "input" not in body:
            asked = any(each["role"] == "tool" for each in body["messages"])
            text = body["messages"][0]["content"]
            if asked:
                return completion({"role": "assistant", "content": text})
            calls = [call("shout", json.dumps({"text": text}), id="1", type="function")]
            return completion({"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls")
        return verdict(hate="BAD" in body["input"] or "worse" in body["input"])

    server = await serve(reply)
    model = OpenAiChatModel("gpt", server.url, "key", max_retries=0)
    loud = create_ai_service(Loud, chat_model=model)
    result = await loud.ask("fine")
    assert [each.result for each in result.tool_executions] == ["FINE"]
    assert [each["input"] for each in server.requests if "input" in each] == ['{"text":"fine"}', "FINE", "fine"]
    assert server.requests[1]["model"] == "text-moderation"
    assert (await loud.ask("bad")).tool_executions[0].result == "Output validation failed: flagged by moderation: hate"
    with pytest.raises(OutputGuardrailError):
        await loud.ask("worse")
    await model.aclose()


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (Scripted(b'{"error": {"message": "wrong key sk-of-the-model"}}', status=401), ModelHttpError),
        (Scripted(b"<html>", content_type="text/html"), ModelProtocolError),
        (Scripted(b"{}"), ModelProtocolError),
        (Scripted(b'{"results": []}'), ModelProtocolError),
        (Scripted(b'{"results": [{"categories": {}}]}'), ModelProtocolError),
        (Scripted(b'{"results": "none"}'), ModelProtocolError),
    ],
    ids=lambda value: getattr(value, "__name__", None) or f"{value.status} {value.body[:12]!r}",
)
async def test_an_endpoint_that_does_not_answer_refuses(serve: Serve, reply: Scripted, cause: type[Exception]) -> None:
    server = await serve([reply])
    model = OpenAiChatModel("gpt", server.url, "sk-of-the-model", max_retries=0)
    with pytest.raises(InputGuardrailError) as caught:
        await create_ai_service(Desk, chat_model=model).ask("hi")
    await model.aclose()
    assert type(caught.value.__cause__) is cause
    assert "sk-of-the-model" not in repr((caught.value.failures, caught.value.__cause__))


async def test_an_unreachable_endpoint_refuses() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    model = OpenAiChatModel("gpt", address, "key", max_retries=0)

    @tool
    @tool_input_guardrails(Moderated)
    def shout(text: str) -> str:
        return text

    with pytest.raises(InputGuardrailError) as caught:
        await create_ai_service(Desk, chat_model=model).ask("hi")
    assert isinstance(caught.value.__cause__, ModelConnectionError)
    await model.aclose()
    scripted = ScriptedChatModel([tool_call("shout", {"text": "x"})])
    with pytest.raises((ToolGuardrailError, IllegalConfigurationError), match="ScriptedChatModel"):
        await create_ai_service(Assistant, chat_model=scripted, tools=[shout]).ask("x")


PICTURE = ImageContent(data=b"\x89PNG")
PICTURE_INPUT = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}]
BILL, VOICE = PdfContent(data=b"%PDF"), AudioContent(b"RIFF", "audio/wav")


class Looking(Protocol):
    @input_guardrails(Moderated())
    async def look(self, message: UserMessage) -> str: ...

    @input_guardrails(Moderated(unjudged="allow"))
    async def read(self, message: UserMessage) -> str: ...


async def test_each_image_of_a_message_is_judged(serve: Serve) -> None:
    hello = completion({"role": "assistant", "content": "hello"})
    server = await serve([verdict(hate=False)] * 2 + [hello] + [verdict(hate=False), verdict(violence=True)])
    model = OpenAiChatModel("gpt", server.url, "key", max_retries=0)
    service = create_ai_service(Looking, chat_model=model)

    assert await service.look(UserMessage(["What is it?", PICTURE])) == "hello"
    with pytest.raises(InputGuardrailError) as caught:
        await service.look(UserMessage([ImageContent("https://a/b.png"), PICTURE]))
    await model.aclose()

    assert caught.value.failures == ((Moderated, "flagged by moderation: violence"),)
    assert [each["input"] for each in server.requests if "input" in each] == [
        "What is it?",
        PICTURE_INPUT,
        [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}],
        PICTURE_INPUT,
    ]


@pytest.mark.parametrize("part", [BILL, VOICE], ids=["document", "audio"])
async def test_parts_that_cannot_be_judged_are_refused_unless_the_program_allows_them(
    serve: Serve, part: PdfContent | AudioContent
) -> None:
    server = await serve([verdict(hate=False), completion({"role": "assistant", "content": "hello"})])
    model = OpenAiChatModel("gpt", server.url, "key", max_retries=0)
    service = create_ai_service(Looking, chat_model=model)

    with pytest.raises(InputGuardrailError) as caught:
        await service.look(UserMessage(["Hi", part]))
    assert caught.value.failures == ((Moderated, f"moderation cannot judge {type(part).__name__}"),)
    assert server.requests == []
    assert await service.read(UserMessage(["Hi", part])) == "hello"
    await model.aclose()


async def test_parts_of_a_tools_result_are_judged(serve: Serve) -> None:
    results: list[Any] = [[PICTURE, TextContent("a map")], BILL]

    @tool
    @tool_output_guardrails(Moderated())
    def look() -> Any:
        return results.pop(0)

    server = await serve([verdict(hate=False), verdict(hate=True)])
    model = OpenAiChatModel("gpt", server.url, "key", max_retries=0)

    class Scripts(ScriptedChatModel):
        call_endpoint = model.call_endpoint

    scripted = Scripts([tool_call("look"), tool_call("look"), "Sorry."])
    service = create_ai_service(Assistant, chat_model=scripted, tools=[look])
    executions = (await service.ask("Look.")).tool_executions
    await model.aclose()

    assert [each["input"] for each in server.requests] == ["a map", PICTURE_INPUT]
    assert [each.result for each in executions] == [
        "Output validation failed: flagged by moderation: hate",
        "Output validation failed: moderation cannot judge PdfContent",
    ]


def test_other_values_of_unjudged_are_errors() -> None:
    with pytest.raises(ValueError, match="use 'refuse' or 'allow'"):
        Moderated(unjudged="ask")  # type: ignore[arg-type]  # on purpose


async def test_an_empty_message_is_not_moderated() -> None:
    model = ScriptedChatModel(["hello"])
    assert await create_ai_service(Desk, chat_model=model).ask(" ") == "hello"
