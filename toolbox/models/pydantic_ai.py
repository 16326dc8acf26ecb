"""`PydanticAiChatModel`: any model of the library pydantic-ai as a `ChatModel`, in both directions.

Not here: assembling the fragments of a reply (`accumulator`), the models that toolbox speaks to itself (`openai`,
`anthropic`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from math import inf
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, assert_never

from ..chat import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    Message,
    Reasoning,
    StreamEvent,
    SystemMessage,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from ..contents import (
    PDF,
    AudioContent,
    Content,
    ImageContent,
    PdfContent,
    TextContent,
    bytes_of,
    media_in,
    media_type_of,
)
from ..errors import (
    IllegalConfigurationError,
    ModelConnectionError,
    ModelError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTimeoutError,
    Problem,
    UnsupportedContentError,
)
from ..json_text import compact_json, object_text, strict_arguments, whole_characters
from ..library_logs import hide_secrets_in_logs
from ..safe_text import hide_secrets
from ..schemas import with_properties
from . import model_requests
from .accumulator import PartialCall, ReplyAccumulator
from .fallbacks import DEFAULT_COOLDOWN
from .reply_endings import is_failure
from .server_errors import (
    LONGEST_WAIT,
    MOST_CONTINUATIONS,
    SHORTEST_SECRET,
    message_of,
    paused_error,
    refusal,
    secrets_in,
    shorten_texts,
    too_large,
    transport_error,
)
from .server_model import names_of
from .server_settings import LARGEST_REPLY, limit_problems, missing_package, reasoning_problems
from .sse import excerpt
from .wire_encoding import OTHER_NAMES, function_name, refuse_unsendable

PARTS = "pydantic_ai"
"""The attribute of a reply with the library's own messages, which are sent back while text and calls are unchanged."""

R = TypeVar("R")


class PydanticAiChatModel(ChatModel):
    """A model of pydantic-ai, which supports nearly every provider.

        model = PydanticAiChatModel("google:gemini-3-pro", reasoning="low")
        model = PydanticAiChatModel(GoogleModel("gemini-3-pro", provider=GoogleProvider(api_key=key)))

    - `model`: `"provider:name"`, or a `Model` of the library. Keys and addresses are those of the library.
    - `temperature`, `max_tokens`, `parallel_tool_calls`, `reasoning`: sent with every request.
    - `parameters`: further settings, by the library's names (`ModelSettings`).
    - `timeout`: seconds for a whole call, with its retries; None for no limit.
    - `max_retries`: retries after failed connections and the statuses 408, 409, 429 and 5xx. The library's own retries
      are turned off.
    - `max_reply_bytes`: the largest reply; None for no limit. The library has read a reply before its size is checked.
    - `fallback`: the names of other models of the container, which are called in order if this one does not answer.
    - `cooldown`: seconds for which a chain of fallbacks skips this model after its server failed; 0 for never.
    - `supports_response_format`: by default, what the library knows about the model.

    It needs the extra `pydantic-ai`, and the package of the model's provider. Raises
    `IllegalConfigurationError` for invalid arguments.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        parallel_tool_calls: bool | None = None,
        reasoning: Reasoning | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        max_reply_bytes: int | None = LARGEST_REPLY,
        fallback: Sequence[str] = (),
        supports_response_format: bool | None = None,
        cooldown: float = DEFAULT_COOLDOWN,
    ) -> None:
        where = f"PydanticAiChatModel({model if isinstance(model, str) else type(model).__name__!r})"
        limits = limit_problems(
            where, timeout=timeout, cooldown=cooldown, max_retries=max_retries, max_reply_bytes=max_reply_bytes
        )
        if problems := [*reasoning_problems(reasoning, where), *limits]:
            raise IllegalConfigurationError(problems)
        self._model = make_model(model, where)
        hide_secrets_in_logs()
        self.fallback, self.cooldown = names_of(fallback), cooldown
        named = {"temperature": temperature, "max_tokens": max_tokens, "parallel_tool_calls": parallel_tool_calls}
        given = {name: value for name, value in named.items() if value is not None}
        self._parameters = {**given, **(parameters or {})}
        self._reasoning = reasoning
        self._timeout, self._max_retries, self._max_reply_bytes = timeout, max_retries, max_reply_bytes
        if supports_response_format is None:
            supports_response_format = bool(self._read_profile().get("supports_json_schema_output"))
        self.supports_response_format = supports_response_format

    def __repr__(self) -> str:
        return f"PydanticAiChatModel({self._model.model_id!r})"

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return str(self._model.model_name)

    @property
    def base_url(self) -> str | None:
        """Return the address of the server, or None if the library does not know it."""
        return self._model.base_url  # type: ignore[no-any-return]  # the library is imported when it is used

    @property
    def server_identity(self) -> tuple[str, str] | None:
        """Return the server's address, and the name of the model there; None if the library knows no address."""
        return None if self.base_url is None else (self.base_url, self.model)

    @property
    def patience(self) -> float:
        """Return the seconds that this model waits for a reply, at most."""
        return self._timeout or inf

    @property
    def provider_name(self) -> str:
        """Return the library's name of the provider."""
        return str(self._model.system)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Return the settings that are sent with every request."""
        return MappingProxyType(self._parameters)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Send a request and return the whole reply. Raises `ModelError`."""
        bridge = self._make_bridge(request)
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    ask = self._model.request
                    reply = await self._retry(lambda ask=ask: ask(*bridge.arguments()))  # type: ignore[misc]
                    bridge.take_whole(reply)
                    if bridge.is_complete(reply):
                        return bridge.finish()
        except Exception as error:
            self._fail(error, request)

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Send a request and yield the reply as events; the last is `CompleteResponse`. Raises `ModelError`."""
        bridge = self._make_bridge(request)
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        try:
            while True:
                async with AsyncExitStack() as stack:
                    first, response = await self._open_stream(stack, bridge, deadline)
                    async for event in _read_until(deadline, first, response):
                        bridge.take(event)
                        for each in bridge.reply.take_events():
                            yield each
                    whole = response.get()
                if bridge.is_complete(whole):
                    bridge.finish()
                    for each in bridge.reply.take_events():
                        yield each
                    return
        except Exception as error:
            self._fail(error, request)

    async def aclose(self) -> None:
        """Close the connections, if the library opened them. The model can be used again."""
        async with self._model:
            pass

    # --- requests

    def _read_profile(self) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = self._model.profile
        except NotImplementedError:  # several models behind one
            return {}
        return found

    def _make_bridge(self, request: ChatRequest) -> _Bridge:
        if model_requests.check is not None and self._model.provider is not None:
            model_requests.check(self.base_url or self._model.model_id)
        settings: dict[str, Any] = {**self._parameters, **request.parameters}
        tools = [*(self._parameters.get("tools") or ()), *(request.parameters.get("tools") or ())]
        if tools:
            _check_native_tools(tools)
        settings.pop("tools", None)
        settings = {OTHER_NAMES.get(name, name): value for name, value in settings.items() if value is not None}
        if request.temperature is not None:
            settings["temperature"] = request.temperature
        if request.max_output_tokens is not None:
            settings["max_tokens"] = request.max_output_tokens
        level = request.reasoning or settings.pop("reasoning_effort", None) or self._reasoning
        is_forced = request.tool_choice not in (None, "auto", "none")
        if level is not None and not is_forced:
            settings["thinking"] = False if level == "none" else level
        if request.tool_choice is not None and (request.tool_specifications or tools):
            known = {"any": "required", "auto": "auto", "none": "none", "required": "required"}
            settings["tool_choice"] = known.get(request.tool_choice, [request.tool_choice])
        if self._model.provider is not None and "max_retries" not in self._model.unsupported_settings:
            settings["max_retries"] = 0
        refuse_contents(request.messages, self._read_profile(), self.model)
        return _Bridge(request, _with_whole_texts(settings), _with_whole_texts(tools), self._max_reply_bytes)

    async def _retry(self, ask: Callable[[], Awaitable[R]]) -> R:
        """Return what `ask` returns, and call it again after failures that may pass."""
        for attempt in range(self._max_retries):
            try:
                return await ask()
            except Exception as error:
                wait = wait_before_retry(error, attempt)
                if wait is None:
                    raise
            await asyncio.sleep(wait)
        return await ask()

    async def _open_stream(self, stack: AsyncExitStack, bridge: _Bridge, deadline: float | None) -> tuple[Any, Any]:
        """Open a stream and return its first event and the stream. Only this part is retried."""

        async def open_once() -> tuple[Any, Any]:
            async with AsyncExitStack() as opened:
                response = await opened.enter_async_context(self._model.request_stream(*bridge.arguments()))
                events = aiter(response)
                first = await anext(events, None)
                stack.push_async_exit(opened.pop_all())
            return (first, events), response

        async with asyncio.timeout_at(deadline):
            return await self._retry(open_once)

    def _fail(self, error: Exception, request: ChatRequest) -> NoReturn:
        """Raise the error of this library for one that pydantic-ai raised; another error unchanged."""
        found = model_error(error, self.base_url or "", self._timeout, request)
        if isinstance(found, ModelError):
            hide_secrets(
                found,
                {each for each in secrets_in([self._parameters, request.parameters]) if len(each) >= SHORTEST_SECRET},
            )
            shorten_texts(found)
        if found is error:
            raise error
        raise found from error


async def _read_until(deadline: float | None, first: tuple[Any, Any], response: Any) -> AsyncIterator[Any]:
    event, events = first
    while event is not None:
        yield event
        async with asyncio.timeout_at(deadline):
            event = await anext(events, None)


def make_model(model: Any, where: str) -> Any:
    """Return the library's model of this name, or the model itself. Raises `IllegalConfigurationError`."""
    try:
        from pydantic_ai.exceptions import UserError
        from pydantic_ai.models import Model, infer_model
    except ImportError as error:
        raise IllegalConfigurationError([missing_package("pydantic-ai", where)]) from error
    if isinstance(model, Model):
        return model
    fix = "pass 'provider:name', such as 'google:gemini-3-pro', or a Model of pydantic-ai"
    if not isinstance(model, str) or not model.strip():
        raise IllegalConfigurationError([Problem(where, f"expected a model, got {type(model).__name__}", fix)])
    try:
        return infer_model(model)
    except ImportError as error:
        what = f"a package of the provider is missing: {error}"
        raise IllegalConfigurationError([Problem(where, what, "install it as the message says")]) from error
    except (UserError, ValueError) as error:
        raise IllegalConfigurationError([Problem(where, str(error), fix)]) from error


# --- failures


def wait_before_retry(error: BaseException, attempt: int) -> float | None:
    """Return the seconds to wait before the next try, or None if the failure is final."""
    from pydantic_ai.exceptions import ModelAPIError, ModelConnectionError, ModelHTTPError

    if isinstance(error, ModelHTTPError):
        if error.status_code not in (408, 409, 429) and error.status_code < 500:
            return None
    elif not isinstance(error, (ModelConnectionError, OSError)) and transport_error(error, "") is None:
        return None
    asked = error.retry_after if isinstance(error, ModelAPIError) else None
    if asked is not None and asked > LONGEST_WAIT:
        return None
    return asked if asked is not None and asked > 0 else min(0.5 * 2**attempt, 8.0) * random.uniform(0.75, 1.0)


def model_error(error: Exception, address: str, timeout: float | None, request: ChatRequest) -> Exception:
    """Return the error of this library for one that pydantic-ai raised; another error unchanged."""
    from pydantic_ai import exceptions as theirs

    if isinstance(error, (ModelError, IllegalConfigurationError)):
        return error
    if isinstance(error, theirs.ModelHTTPError):
        headers = error.headers or {}
        body = error.body if isinstance(error.body, str) else compact_json(error.body) if error.body else ""
        said = message_of(error.body) or error.message
        request_id = headers.get("x-request-id") or headers.get("request-id")
        return refusal(error.status_code, said, excerpt(body.encode("utf-8", "replace")), request_id, error.body)
    if isinstance(error, TimeoutError) and type(error) is TimeoutError:
        return ModelTimeoutError(f"no complete reply within {timeout or 0:g} s; raise timeout=")
    if isinstance(error, theirs.ModelTimeoutError):
        return ModelTimeoutError(f"timeout while waiting for the model server: {error.message}")
    if isinstance(error, theirs.ModelAPIError):
        return ModelConnectionError(f"the request to the model server failed: {error.message}")
    if isinstance(error, theirs.ContentFilterError):
        return ModelRefusedError(error.message)
    if isinstance(error, theirs.UnexpectedModelBehavior):
        return ModelProtocolError(error.message, str(getattr(error, "body", None) or ""))
    kind = next((type(each).__name__ for message in request.messages for each in _media(message)), None)
    if kind is not None and isinstance(error, (theirs.UserError, NotImplementedError)):
        return UnsupportedContentError(kind, f"pydantic-ai cannot send it to this model: {error}")
    if isinstance(error, theirs.UserError):
        return IllegalConfigurationError([Problem("PydanticAiChatModel", str(error), "change the model's settings")])
    return transport_error(error, address) or error


def _media(message: Message) -> Sequence[Content]:
    return media_in(message.contents) if isinstance(message, (UserMessage, ToolExecutionResultMessage)) else ()


# --- translating


class _Bridge:
    """Translates one request and its reply, which may arrive in several parts."""

    def __init__(self, request: ChatRequest, settings: dict[str, Any], tools: list[Any], largest: int | None) -> None:
        from pydantic_ai.models import ModelRequestParameters
        from pydantic_ai.output import OutputObjectDefinition
        from pydantic_ai.tools import ToolDefinition

        names = {each.name for each in request.tool_specifications}
        self.reply = ReplyAccumulator(names, wants_json=request.response_format is not None)
        self._messages = messages_of(request.messages, names)
        self._settings = settings
        self._replies: list[Any] = []
        self._calls: dict[object, PartialCall] = {}
        self._size, self._largest = 0, largest
        parameters: dict[str, Any] = {}
        if (wanted := request.response_format) is not None:
            parameters["output_mode"] = "native"
            about = _with_whole_texts({"name": wanted.name, "description": wanted.description})
            schema = _with_whole_texts(wanted.schema)
            parameters["output_object"] = OutputObjectDefinition(schema, strict=wanted.strict, **about)
        self._parameters = ModelRequestParameters(
            function_tools=[
                ToolDefinition(
                    name=each.name,
                    description=_with_whole_texts(each.description),
                    parameters_json_schema=_with_whole_texts(with_properties(each.parameters)),
                    strict=each.strict,
                )
                for each in request.tool_specifications
            ],
            native_tools=tools,
            **parameters,
        )

    def arguments(self) -> tuple[list[Any], Any, Any]:
        """Return the arguments of the library's request."""
        return [*self._messages, *self._replies], self._settings, self._parameters

    def take_whole(self, response: Any) -> None:
        """Read a reply that is not streamed."""
        for number, part in enumerate(response.parts):
            self._start_part(number, part)

    def take(self, event: Any) -> None:
        """Read an event of a stream."""
        match type(event).__name__:
            case "PartStartEvent":
                self._start_part(event.index, event.part)
            case "PartDeltaEvent":
                self._read_delta(event.index, event.delta)
            case "PartEndEvent":
                # The last call is complete when the reply is, because a token limit may have cut it.
                if event.next_part_kind is not None and (call := self._calls.get(event.index)) is not None:
                    self.reply.end_call(call, event.part.args if not call.fragments else None)

    def _start_part(self, index: int, part: Any) -> None:
        match part.part_kind:
            case "text":
                self._count_piece(part.content)
                self.reply.text(part.content)
            case "thinking":
                self._count_piece(part.content)
                self.reply.reasoning(part.content)
            case "tool-call":
                key = (len(self._replies), index)
                arguments = part.args if part.args not in (None, {}, "") else None
                self._count_piece(arguments)
                self._calls[index] = self.reply.call_piece(str(key), part.tool_call_id, part.tool_name, arguments)

    def _read_delta(self, index: int, delta: Any) -> None:
        match delta.part_delta_kind:
            case "text":
                self._count_piece(delta.content_delta)
                self.reply.text(delta.content_delta)
            case "thinking" if delta.content_delta:
                self._count_piece(delta.content_delta)
                self.reply.reasoning(delta.content_delta)
            case "tool_call":
                key = (len(self._replies), index)
                self._count_piece(delta.args_delta)
                call = self.reply.call_piece(str(key), None, delta.tool_name_delta, delta.args_delta)
                self._calls[index] = call

    def _count_piece(self, piece: object) -> None:
        if self._largest is None or not piece:
            return
        self._size += len(piece.encode("utf-8", "replace")) if isinstance(piece, str) else len(compact_json(piece))
        if self._size > self._largest:
            raise too_large(self._largest)

    def is_complete(self, response: Any) -> bool:
        """Keep a reply, and return False if the server wants to continue it. Raises `ModelProtocolError`."""
        self._replies.append(response)
        self._calls.clear()
        if response.state != "suspended":
            return True
        if len(self._replies) > MOST_CONTINUATIONS:
            raise paused_error()
        return False

    def finish(self) -> ChatResponse:
        """Return the whole reply. Raises `ModelError`."""
        from pydantic_ai.messages import ModelMessagesTypeAdapter

        reply, last = self.reply, self._replies[-1]
        for each in self._replies:
            usage = _read_usage(each.usage)
            reply.usage = usage if reply.usage is None or usage is None else reply.usage + usage
        reply.id, reply.model = last.provider_response_id, last.model_name
        details = last.provider_details or {}
        word, ending = details.get("finish_reason"), last.finish_reason
        if ending == "content_filter" and (word == "refusal" or details.get("refusal")):
            text = "".join(part.content for each in self._replies for part in each.parts if part.part_kind == "text")
            raise ModelRefusedError(str(details.get("refusal") or text or "the model refused to answer"), text or None)
        # The library knows the words of its providers, but not all that are failures. A model that says nothing about
        # the end has ended by itself.
        reply.end(word if isinstance(word, str) and is_failure(word) else ending or "stop")
        reply.ending = str(word or ending)
        reply.ends_in_call = bool(last.parts) and last.parts[-1].part_kind == "tool-call"
        reply.of_response |= {name: value for name, value in details.items() if name != "timestamp"}
        reply.attributes[PARTS] = ModelMessagesTypeAdapter.dump_python(self._replies, mode="json")
        return reply.finish()


def _read_usage(usage: Any) -> TokenUsage | None:
    if not usage.has_values():
        return None
    details = usage.details or {}
    names = ("reasoning_tokens", "thoughts_tokens", "thinking_tokens")  # of usage that a program's own model counted
    thought = usage.output_reasoning_tokens or next(filter(None, map(details.get, names)), 0)
    counts = (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens, thought, usage.cache_write_tokens)
    return TokenUsage(*(each or 0 for each in counts))


def _check_native_tools(tools: Sequence[Any]) -> None:
    """Raise `IllegalConfigurationError` for a tool in the form of a provider, which the library cannot send."""
    from pydantic_ai.native_tools import AbstractNativeTool

    for each in tools:
        if not isinstance(each, AbstractNativeTool):
            fact = f"parameters['tools'] contains a {type(each).__name__}, which pydantic-ai cannot send"
            fix = "pass a tool of pydantic_ai.native_tools, such as WebSearchTool()"
            raise IllegalConfigurationError([Problem("PydanticAiChatModel", fact, fix)])


def refuse_contents(messages: Sequence[Message], profile: Mapping[str, Any], model: str) -> None:
    """Raise `UnsupportedContentError` for the first part that the model's profile does not support.

    The library itself sends what is in a user message, and replaces a file in a tool's result by a note.
    """
    for number, message in enumerate(messages):
        if isinstance(message, (UserMessage, ToolExecutionResultMessage)):
            for at, content in enumerate(message.contents):
                place = f"messages.{number}.contents.{at}"
                refuse_unsendable(content, place)
                if (kind := _unsupported_by(profile, content)) is not None:
                    fix = "use another model, or set profile= of the pydantic-ai model if this is wrong"
                    reason = f"pydantic-ai's profile of {model} does not support {kind}; {fix}"
                    raise UnsupportedContentError(type(content).__name__, reason, place)


def _unsupported_by(profile: Mapping[str, Any], content: Content) -> str | None:
    """Return the kind of a part that a profile does not support, or None."""
    match content:
        case TextContent():
            return None
        case ImageContent():
            return None if profile.get("supports_image_input", True) else "images"
        case PdfContent():
            types = profile.get("supported_document_media_types")
            accepted = profile.get("supports_document_input", True) and (types is None or PDF in types)
            return None if accepted else "PDF documents"
        case AudioContent():
            return None if profile.get("supports_audio_file_input", True) else "audio"
        case _:
            assert_never(content)


def _with_whole_texts(value: Any) -> Any:
    """Return a value with the texts in it as `whole_characters` has them. The packages of providers refuse others."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, Mapping):
        return {_with_whole_texts(name): _with_whole_texts(each) for name, each in value.items()}
    return [_with_whole_texts(each) for each in value] if isinstance(value, (list, tuple)) else value


def messages_of(messages: Sequence[Message], offered: Collection[str] = ()) -> list[Any]:
    """Return the messages as those of pydantic-ai; what the user and the tools say in a row is one request.

    `offered` are the names of the tools in the request. Servers may refuse all others, which a model may have invented.
    """
    from pydantic_ai.messages import ModelRequest

    found: list[Any] = []
    parts: list[Any] = []
    for message in messages:
        if isinstance(message, AiMessage):
            if parts:
                found.append(ModelRequest(parts))
                parts = []
            found += _convert_reply(message, offered)
        else:
            parts.append(_convert_message(message, offered))
    if parts:
        found.append(ModelRequest(parts))
    return found


def _valid_name(name: str, offered: Collection[str]) -> str:
    return name if name in offered else function_name(name)


def _convert_message(
    message: SystemMessage | UserMessage | ToolExecutionResultMessage, offered: Collection[str]
) -> Any:
    from pydantic_ai.messages import SystemPromptPart, ToolReturnPart, UserPromptPart

    match message:
        case SystemMessage(text):
            return SystemPromptPart(whole_characters(text))
        case UserMessage():
            contents = [_convert_content(each) for each in message.contents]
            text = whole_characters(message.text)
            return UserPromptPart(text if all(isinstance(each, str) for each in contents) else contents)
        case ToolExecutionResultMessage():
            content: Any = whole_characters(message.text)
            if media_in(message.contents):
                content = [_convert_content(each) for each in message.contents]
                if message.text and not any(isinstance(each, str) for each in content):
                    content = [whole_characters(message.text), *content]
            outcome: Any = "failed" if message.is_error else "success"
            name = _valid_name(message.tool_name, offered)
            return ToolReturnPart(name, content, message.id, outcome=outcome)
        case _:
            assert_never(message)


def _convert_content(content: Content) -> Any:
    from pydantic_ai.messages import BinaryContent, DocumentUrl, ImageUrl

    match content:
        case TextContent(text):
            return whole_characters(text)
        case ImageContent():
            metadata = {"detail": content.detail} if content.detail else None
            if (data := bytes_of(content)) is None:
                return ImageUrl(content.url or "", vendor_metadata=metadata)
            return BinaryContent(data, media_type=media_type_of(content), vendor_metadata=metadata)
        case PdfContent():
            if (data := bytes_of(content)) is None:
                return DocumentUrl(content.url or "", media_type="application/pdf")
            return BinaryContent(data, media_type="application/pdf")
        case AudioContent():
            return BinaryContent(bytes_of(content) or b"", media_type=media_type_of(content))
        case _:
            assert_never(content)


def _convert_reply(message: AiMessage, offered: Collection[str]) -> list[Any]:
    """Return a reply as messages of the library: its own while text and calls are unchanged."""
    from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse, TextPart, ToolCallPart

    if kept := message.attributes.get(PARTS):
        try:
            responses = ModelMessagesTypeAdapter.validate_python(kept)
        except ValueError:
            responses = []
        if responses and _says_the_same(responses, message):
            parts: list[Any] = [part for each in responses for part in each.parts]
            for part in parts:
                if part.part_kind == "tool-call":
                    part.tool_name = _valid_name(part.tool_name, offered)
            return responses
    text = [TextPart(whole_characters(message.text))] if message.text else []
    calls = [
        ToolCallPart(_valid_name(each.name, offered), object_text(each.arguments), each.id)
        for each in message.tool_execution_requests
    ]
    return [ModelResponse([*text, *calls])] if text or calls else []


def _says_the_same(responses: Sequence[Any], message: AiMessage) -> bool:
    parts = [part for each in responses for part in getattr(each, "parts", ())]
    text = "".join(part.content for part in parts if part.part_kind == "text")
    calls = [
        (part.tool_call_id, part.tool_name, part.args_as_dict()) for part in parts if part.part_kind == "tool-call"
    ]
    return text == (message.text or "") and calls == [_read_call(each) for each in message.tool_execution_requests]


def _read_call(request: ToolExecutionRequest) -> tuple[str, str, dict[str, Any]]:
    return request.id, request.name, strict_arguments(object_text(request.arguments)) or {}
