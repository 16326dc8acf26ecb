"""Invalid options are reported when a model is created, without secrets."""

import copy
import pickle
import traceback
from typing import Any, Literal

import pytest

from tests.models.scripted_server import Scripted, Serve
from toolbox import (
    ChatRequest,
    IllegalConfigurationError,
    ModelConnectionError,
    ModelHttpError,
    OpenAiChatModel,
    UserMessage,
)

HI = ChatRequest([UserMessage("Hi")])
URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_url": "ftp://secret/v1"}, "http://"),
        ({"base_url": "localhost:11434/v1"}, "http://"),
        ({"base_url": "http://"}, "the host or port"),
        ({"base_url": "http://exa mple/v1"}, "the host or port"),
        ({"base_url": "http://127.0.0.1:99999/v1"}, "the host or port"),
        ({"base_url": "http://[::1"}, "the host or port"),
        ({"base_url": f"{URL}\n"}, "the host or port"),
        ({"base_url": "http://user:secret@127.0.0.1/v1"}, "user name or password"),
        ({"api_key": "secret\n"}, "a line break"),
        ({"api_key": "sec ret"}, "a space"),
        ({"api_key": "sécret"}, "headers do not allow"),
        ({"api_key": b"secret"}, "of type bytes"),
        ({"timeout": 0}, "invalid timeout=0"),
        ({"timeout": "5"}, "invalid timeout='5'"),
        ({"read_timeout": -1}, "invalid read_timeout=-1"),
        ({"max_retries": -1}, "invalid max_retries=-1"),
        ({"max_retries": None}, "invalid max_retries=None"),
        ({"max_concurrent_requests": 0}, "invalid max_concurrent_requests=0"),
        ({"extra_headers": {"X-Team": "secret\nX: y"}}, "'X-Team'"),
        ({"extra_headers": {"X-Team": 7}}, "'X-Team'"),
        ({"transport": "requests"}, "'requests'"),
        ({"model": ""}, "missing model name"),
    ],
)
def test_invalid_options_are_reported_with_place_and_fix(options: dict[str, Any], says: str) -> None:
    with pytest.raises(IllegalConfigurationError) as caught:
        OpenAiChatModel(**{"model": "m", "base_url": URL, **options})

    [problem] = caught.value.problems
    assert problem.where.startswith("OpenAiChatModel(")
    assert says in f"{problem.what} {problem.fix}"
    assert problem.fix
    assert "secret" not in str(caught.value)


def test_all_invalid_options_are_reported_together() -> None:
    with pytest.raises(IllegalConfigurationError) as caught:
        OpenAiChatModel("m", URL, "a b", timeout=0, max_retries=-1)

    assert len(caught.value.problems) == 3


def test_unknown_options_are_rejected_by_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        OpenAiChatModel("m", URL, temprature=1)  # type: ignore[call-arg]  # on purpose


def test_repr_and_copies_of_a_model_contain_no_secret() -> None:
    model = OpenAiChatModel(
        "m", URL, "secret", extra_headers={"authorization": "secret"}, extra_query={"key": "secret"}
    )

    assert "secret" not in f"{model!r} {model} {vars(model)}"
    assert "127.0.0.1:9" in repr(model)
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="create a new model instead") as caught:
            way(model)
        assert "secret" not in str(caught.value)


@pytest.mark.anyio
async def test_errors_and_logs_contain_no_secret(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    server = await serve([Scripted(b'{"error": {"message": "no such key"}}', status=401)])
    texts = []
    for url, kind in ((server.url, ModelHttpError), (URL, ModelConnectionError)):
        model = OpenAiChatModel(
            "m", url, "secret", extra_headers={"X-Api-Key": "secret"}, extra_query={"key": "secret"}, max_retries=1
        )
        with pytest.raises(kind) as caught:
            await model.chat(HI)
        texts.append(f"{caught.value} {caught.value!r} {pickle.dumps(caught.value)!r}")
        await model.aclose()

    assert "secret" not in " ".join(texts)
    assert not [each for each in caplog.messages if "secret" in each]


@pytest.mark.anyio
@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
@pytest.mark.parametrize("status", [200, 400])
async def test_secrets_that_a_server_repeats_are_hidden(
    serve: Serve, transport: Literal["aiohttp", "httpx2"], status: int
) -> None:
    said = b'{"error": {"message": "Bearer SECRET-key, SECRET-header, ?key=SECRET-query"}}'
    server = await serve([Scripted(said, status=status)] * 2)
    headers, query = {"x-session": "SECRET-header"}, {"key": "SECRET-query"}
    model = OpenAiChatModel(
        "m", server.url, "SECRET-key", extra_headers=headers, extra_query=query, transport=transport, max_retries=0
    )
    for ask in (model.chat(HI), anext(model.stream(HI))):
        with pytest.raises(ModelHttpError) as caught:
            await ask
        shown = "".join(traceback.format_exception(caught.value))
        assert "SECRET" not in f"{shown} {caught.value!r} {caught.value.body} {pickle.dumps(caught.value)!r}"
        assert "***, ***" in str(caught.value)
    await model.aclose()


def test_a_base_url_with_a_query_is_rejected() -> None:
    with pytest.raises(IllegalConfigurationError, match="extra_query=") as caught:
        OpenAiChatModel("m", f"{URL}?key=secret", "k")
    assert "secret" not in str(caught.value)
