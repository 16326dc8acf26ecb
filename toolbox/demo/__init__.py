"""`DemoChatModel`: plans tool calls and writes answers by rules, without a language model.

Not here: reading values from prompts and schemas (`values`), a model that follows a script (`toolbox.testing`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

from ..chat import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    FinishReason,
    Message,
    StreamEvent,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from ..chat_streams import events_of, words
from ..json_text import compact_json, parse_json, strict_arguments
from .values import (
    Prompt,
    Schema,
    answer,
    branches,
    example,
    fits,
    resolved,
    scalar_for,
    schema_in,
    types_of,
    values_named,
)

__all__ = ["DemoChatModel"]


class DemoChatModel:
    """Replaces a language model in demonstrations: deterministic, in process, without a network.

        container = Container(models={"default": DemoChatModel()})

    In each round, it calls the first offered tool that it has not called for this question and whose required arguments
    it can fill. It fills a parameter from the newest tool result with a property of the same name and a matching type,
    at any depth. It fills other required parameters from the user's text: a number with the next number (each number
    is used once), a date with the next ISO date, an enum with its first value that the text contains as a word. A
    required `str` is the newest unused plain-text result, else the user's text, which is used for one tool only. If it
    cannot fill another call, it answers with a sentence that contains the results.

    Without tools, it answers with simple rules for English. For example, if the prompt asks to extract a city, it looks
    for a name after a preposition.

    It does not understand language, and the same request always has the same answer. Use it for demonstrations and to
    test the wiring of a program. A container uses it only if you pass it, or with `TOOLBOX_DEMO=1` if no default model
    is configured.
    """

    supports_response_format = True

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the next tool call, or the answer."""
        current = CurrentQuestion.of(request.messages)
        if (call := _next_call(request, current)) is not None:
            return ChatResponse(AiMessage(tool_execution_requests=(call,)), finish_reason=FinishReason.TOOL_EXECUTION)
        return ChatResponse(AiMessage(_answer(request, current)), finish_reason=FinishReason.STOP)

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the reply of `chat` as stream events, word by word."""
        for event in events_of(await self.chat(request), words):
            yield event


# --- the conversation so far


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The result of a tool as a value; text that is not JSON is a `str`."""

    tool: str
    value: object
    is_error: bool


@dataclass(frozen=True, slots=True)
class CurrentQuestion:
    """The last question of a conversation, with the tool calls and results since, in order."""

    system: str
    question: str
    events: tuple[ToolExecutionRequest | ToolOutput, ...]
    calls_before: int

    @classmethod
    def of(cls, messages: Sequence[Message]) -> CurrentQuestion:
        """Read a conversation. The question is the last user message with text; images of tool results have none."""
        start = max((at for at, each in enumerate(messages) if isinstance(each, UserMessage) and each.text), default=0)
        question = messages[start] if messages else None
        events: list[ToolExecutionRequest | ToolOutput] = []
        for message in messages[start:]:
            if isinstance(message, AiMessage):
                events += message.tool_execution_requests
            elif isinstance(message, ToolExecutionResultMessage):
                events.append(ToolOutput(message.tool_name, _value_of(message.text), message.is_error))
        return cls(
            system="\n".join(each.text for each in messages if isinstance(each, SystemMessage)),
            question=question.text if isinstance(question, UserMessage) else "",
            events=tuple(events),
            calls_before=sum(len(each.tool_execution_requests) for each in messages if isinstance(each, AiMessage)),
        )

    @property
    def outputs(self) -> list[ToolOutput]:
        """The results of tools, the oldest first."""
        return [each for each in self.events if isinstance(each, ToolOutput)]

    def called(self) -> set[str]:
        """Return the names of the tools that were called."""
        return {each.name for each in self.events if isinstance(each, ToolExecutionRequest)}

    def named(self, name: str, schema: object, root: Schema) -> Iterator[object]:
        """Yield the values under this name that fit the schema, the newest result first."""
        for output in reversed(self.outputs):
            if not output.is_error:
                yield from (value for value in values_named(name, output.value) if fits(value, schema, root))

    def unused_texts(self) -> Iterator[str]:
        """Yield the plain-text results that no later call used, the newest first."""
        given: list[object] = []
        for event in reversed(self.events):
            if isinstance(event, ToolExecutionRequest):
                given += _arguments(event).values()
            elif not event.is_error and isinstance(event.value, str) and event.value and event.value not in given:
                yield event.value

    def unused_values(self) -> list[str]:
        """Return the numbers and dates in the user's text that no call used, in order."""
        values = _values_in(self.question)
        for event in self.events:
            if isinstance(event, ToolExecutionRequest):
                for given in _arguments(event).values():
                    used = next((each for each in values if given in (_number_in(each), each, each[:10])), None)
                    if used is not None and not isinstance(given, bool):
                        values.remove(used)
        return values

    def question_is_used(self) -> bool:
        """Return True if a tool call used the user's text."""
        calls = (each for each in self.events if isinstance(each, ToolExecutionRequest))
        return any(self.question in _arguments(call).values() for call in calls)


def _arguments(call: ToolExecutionRequest) -> dict[str, Any]:
    return strict_arguments(call.arguments) or {}


DONE = object()
"""The value of a tool that returns nothing."""


def _value_of(text: str) -> object:
    """Return the value of a JSON result. Other text is returned unchanged."""
    try:
        return parse_json(text)
    except ValueError:
        return DONE if text == "Success" else text


# --- the next call


def _next_call(request: ChatRequest, current: CurrentQuestion) -> ToolExecutionRequest | None:
    if request.tool_choice == "none":
        return None
    called = current.called()
    open_tools = [each for each in request.tool_specifications if each.name not in called]
    forced = request.tool_choice not in (None, "auto")
    if forced and request.tool_choice != "required":
        open_tools = [each for each in open_tools if each.name == request.tool_choice]
    for tool in open_tools:
        if (arguments := _filled(tool, current)) is not None:
            return _call(tool, arguments, current)
    if forced and open_tools and not called:
        return _call(open_tools[0], _guessed(open_tools[0].parameters, current), current)
    return None


def _call(tool: ToolSpecification, arguments: Mapping[str, Any], current: CurrentQuestion) -> ToolExecutionRequest:
    return ToolExecutionRequest(f"demo_{current.calls_before + 1}", tool.name, compact_json(arguments))


def _filled(tool: ToolSpecification, current: CurrentQuestion) -> dict[str, Any] | None:
    """Return the arguments for `tool`, or None if a required argument cannot be filled."""
    schema = tool.parameters
    arguments: dict[str, Any] = {}
    texts, values = current.unused_texts(), current.unused_values()
    for name, each in schema.get("properties", {}).items():
        found = next(current.named(name, each, schema), _MISSING)
        if found is _MISSING and name in schema.get("required", ()):
            found = _value_for(each, schema, current.question, values)
        if found is _MISSING and name in schema.get("required", ()):
            found = _text_for(each, schema, current, texts)
            if found is _MISSING:
                return None
        if found is not _MISSING:
            arguments[name] = found
    return arguments


def _value_for(schema: object, root: Schema, question: str, values: list[str]) -> object:
    """Return an enum's value, a number or a date from the user's text, and remove it from `values`."""
    schema = resolved(schema, root)
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return next((each for each in choices if _contains_word(question, each)), _MISSING)
    for branch in branches(schema):
        before = tuple(values)
        if (found := _value_for(branch, root, question, values)) is not _MISSING:
            if isinstance(found, float) and _allows_text(schema, root):
                digits = next(each for each in before if _number_in(each) == found).replace(",", "")
                return found if str(found) == digits else digits  # keeps the digits of a `Decimal`: 7.50
            return found
    kinds, form = types_of(schema), schema.get("format")
    for text in values:
        value: object = _MISSING
        if form in ("date", "date-time"):
            value = _date_in(text, form)
        elif "integer" in kinds or "number" in kinds:
            value = _number_in(text)
        if value is not _MISSING and fits(value, schema, root):
            values.remove(text)
            return int(value) if "integer" in kinds and isinstance(value, float) else value
    return _MISSING


def _allows_text(schema: Schema, root: Schema) -> bool:
    """Return True if one of the alternatives is any string."""
    return any(resolved(branch, root) == {"type": "string"} for branch in branches(schema))


def _contains_word(text: str, value: object) -> bool:
    word = value if isinstance(value, str) else str(value) if type(value) in (int, float) else ""
    return bool(word) and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


# ISO dates are matched before numbers. A `-` directly before a digit is its sign.
_VALUE = re.compile(
    r"(?<!\d)\d{4}-\d{2}-\d{2}(?:T\d{2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?(?:Z|[+-]\d{2}:\d{2})?)?(?!\d)"
    r"|-?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?"
)
_LONGEST_NUMBER = 40


def _values_in(text: str) -> list[str]:
    """Return the dates and numbers of a text, in order."""
    return [found.group() for found in _VALUE.finditer(text) if len(found.group()) <= _LONGEST_NUMBER]


def _number_in(text: str) -> object:
    digits = text.replace(",", "")
    if _date_in(text, "date") is not _MISSING:
        return _MISSING
    return int(digits) if digits.lstrip("-").isdigit() else float(digits)


def _date_in(text: str, form: str) -> object:
    """Return an ISO date, or date and time, that exists in the calendar."""
    day = text[:10]
    try:
        date.fromisoformat(day)
        datetime.fromisoformat(text)
    except ValueError:
        return _MISSING
    return day if form == "date" else text


def _text_for(schema: object, root: Schema, current: CurrentQuestion, texts: Iterator[str]) -> object:
    """Return a text for a `str` parameter: the newest plain-text result, else the user's text."""
    if not fits_text(schema, root):
        return _MISSING
    for text in texts:
        if fits(text, schema, root):
            return text
    usable = current.question.strip() and not current.question_is_used() and fits(current.question, schema, root)
    return current.question if usable else _MISSING


def fits_text(schema: object, root: Schema) -> bool:
    """Return True if the schema allows strings explicitly."""
    schema = resolved(schema, root)
    return "string" in types_of(schema) or any(fits_text(each, root) for each in branches(schema))


_MISSING = object()


# --- the answer


def _answer(request: ChatRequest, current: CurrentQuestion) -> str:
    prompt = Prompt(current.system, current.question)
    if current.outputs:
        text = _sentence(current.outputs, current.question)
    elif request.tool_specifications and request.tool_choice != "none":
        names = ", ".join(each.name for each in request.tool_specifications)
        text = f"I cannot answer that: I found no values for the arguments of my tools ({names})."
    else:
        text = answer(prompt)
    schema = request.response_format.schema if request.response_format is not None else _schema_shown(current)
    if schema is None:
        return text
    return compact_json(_guessed(schema, current, text))


def _schema_shown(current: CurrentQuestion) -> Schema | None:
    return schema_in(current.question) or schema_in(current.system)


def _guessed(schema: Schema, current: CurrentQuestion, text: str | None = None) -> Any:
    """Return a value of `schema`, filled from result properties of the same name, else from the prompt."""
    prompt = Prompt(current.system, current.question)

    def fill(name: str | None, each: Schema) -> object:
        found = next(current.named(name, each, schema), None) if name is not None else None
        return found if found is not None else scalar_for(name, each, prompt, text)

    return example(schema, schema, fill)


def _sentence(outputs: Sequence[ToolOutput], question: str) -> str:
    """Return the last results as sentences."""
    last = [replace(each, value=_relevant(each.value, question.casefold())) for each in outputs[-3:]]
    if last[-1].is_error or _is_nothing(last[-1].value):
        return f"I am sorry, I could not find an answer. {_phrases(last)}"
    return f"Here is what I found. {_phrases(last)}"


def _phrases(outputs: Sequence[ToolOutput]) -> str:
    return " ".join(f"{_phrase(each)}." for each in outputs)


def _phrase(output: ToolOutput) -> str:
    title = output.tool.replace("_", " ")
    if output.is_error:
        return f"{title} failed: {_spoken(output.value).rstrip('.')}"
    if output.value is DONE:
        return f"{title} is done"
    if _is_nothing(output.value):
        return f"{title} found nothing"
    return f"{title}: {_spoken(output.value).rstrip('.')}"


def _relevant(value: object, question: str) -> object:
    """Return a result in which lists of objects contain only those that the question names, if it names any."""
    if isinstance(value, dict):
        return {key: _relevant(each, question) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    items = [_relevant(each, question) for each in value]
    return [each for each in items if isinstance(each, dict) and _is_named(each, question)] or items


def _is_named(item: Mapping[str, object], question: str) -> bool:
    texts = (each.casefold() for each in item.values() if isinstance(each, str) and each)
    return any(re.search(rf"\b{re.escape(text)}\b", question) for text in texts)


def _is_nothing(value: object) -> bool:
    """Return True if a result contains no value, such as `{"results": []}`."""
    if isinstance(value, dict):
        return all(map(_is_nothing, value.values()))
    if isinstance(value, list):
        return all(map(_is_nothing, value))
    return value is None or value == ""


def _spoken(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{str(key).replace('_', ' ')} {_spoken(each)}" for key, each in value.items())
        case list():
            shown = [_spoken(each) for each in value[:10]]
            between = "; " if any(isinstance(each, (dict, list)) for each in value) else " / "
            return between.join(shown) + (f" and {len(value) - 10} more" if len(value) > 10 else "")
        case _:
            return str(value)
