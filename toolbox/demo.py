"""`DemoChatModel`: plans tool calls and writes answers by rules, without a language model.

Its values come from the prompt, by a few rules for English, and fit the schemas of the tools. Not here: a model that
follows a script (`toolbox.testing`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import NoneType
from typing import Any, TypeAlias

from .chat import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    FinishReason,
    Message,
    StreamEvent,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from .chat_streams import events_of, words
from .json_text import compact_json, parse_json, strict_arguments
from .schemas import readable

__all__ = ["DemoChatModel"]

Schema: TypeAlias = Mapping[str, Any]

_MISSING = object()
_DONE = object()
"""The value of a tool that returns nothing."""


class DemoChatModel(ChatModel):
    """Replaces a language model in demonstrations: deterministic, in process, without a network.

        container = Container(models={"default": DemoChatModel()})

    In each round, it calls the first offered tool that it has not called for this question and whose required arguments
    it can fill. It fills a parameter from the newest tool result with a property of the same name and a matching type,
    at any depth. It fills other required parameters from the user's text: a number with the next number (each number
    is used once), a date with the next ISO date, an enum with its first value that the text contains as a word. A
    required `str` is the newest unused plain-text result, else the user's text, which is used for one tool only. If it
    cannot fill another call, it answers with a sentence that contains the results.

    Without tools, it repeats the user's text. If the prompt asks to extract a name, such as that of a city, it looks
    for a word with a capital letter after a preposition.

    It does not understand language, and the same request always has the same answer. Use it for demonstrations and to
    test the wiring of a program. A container uses it only if you pass it, or with `TOOLBOX_DEMO=1` if no default model
    is configured.
    """

    supports_response_format = True

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the next tool call, or the answer."""
        question = Question.read(request.messages)
        if (call := _find_next_call(request, question)) is not None:
            return ChatResponse(AiMessage(tool_execution_requests=(call,)), finish_reason=FinishReason.TOOL_EXECUTION)
        return ChatResponse(AiMessage(_write_answer(request, question)), finish_reason=FinishReason.STOP)

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the reply of `chat` as stream events, word by word."""
        for event in events_of(await self.chat(request), words):
            yield event


# --- the conversation so far


@dataclass(frozen=True, slots=True)
class Question:
    """The last question of a conversation, with the tool calls and results since."""

    system: str
    text: str
    since: Sequence[Message]
    calls_before: int

    @classmethod
    def read(cls, messages: Sequence[Message]) -> Question:
        """Read a conversation. The question is the last user message with text; images of tool results have none."""
        start = max((at for at, each in enumerate(messages) if isinstance(each, UserMessage) and each.text), default=0)
        question = messages[start] if messages else None
        return cls(
            system="\n".join(each.text for each in messages if isinstance(each, SystemMessage)),
            text=question.text if isinstance(question, UserMessage) else "",
            since=messages[start:],
            calls_before=sum(len(each.tool_execution_requests) for each in messages if isinstance(each, AiMessage)),
        )

    @property
    def calls(self) -> list[ToolExecutionRequest]:
        """The tool calls, the oldest first."""
        return [call for each in self.since if isinstance(each, AiMessage) for call in each.tool_execution_requests]

    @property
    def results(self) -> list[ToolExecutionResultMessage]:
        """The results of tools, the oldest first."""
        return [each for each in self.since if isinstance(each, ToolExecutionResultMessage)]

    def find_result(self, name: str, schema: object) -> object:
        """Return the newest value of a property `name` in a result that fits the schema, or `_MISSING`."""
        values = (_read_value(each.text) for each in reversed(self.results) if not each.is_error)
        return next((found for value in values for found in _named(name, value) if _fits(found, schema)), _MISSING)

    def unused_texts(self) -> list[str]:
        """Return the plain-text results that no later call used, the newest first, then the user's text if unused."""
        texts: list[str] = []
        given: list[object] = []
        for each in reversed(self.since):
            if isinstance(each, AiMessage):
                given += _values_given(each.tool_execution_requests)
            elif isinstance(each, ToolExecutionResultMessage) and not each.is_error:
                value = _read_value(each.text)
                if isinstance(value, str) and value and value not in given:
                    texts.append(value)
        return [*texts, self.text] if self.text.strip() and self.text not in given else texts

    def unused_values(self) -> list[str]:
        """Return the numbers and dates in the user's text that no call used, in order."""
        values = _find_values(self.text)
        for given in _values_given(self.calls):
            used = next((each for each in values if given in (each, each[:10], _find_number(each))), None)
            if used is not None and not isinstance(given, bool):
                values.remove(used)
        return values


def _values_given(calls: Iterable[ToolExecutionRequest]) -> list[object]:
    return [value for call in calls for value in (strict_arguments(call.arguments) or {}).values()]


def _read_value(text: str) -> object:
    """Return the value of a JSON result. Other text is returned unchanged."""
    try:
        return parse_json(text)
    except ValueError:
        return _DONE if text == "Success" else text


def _named(name: str, value: object) -> Iterator[object]:
    """Yield the values of properties called `name`, at any depth of objects and lists."""
    if isinstance(value, dict) and name in value:
        yield value[name]
    if isinstance(value, (dict, list)):
        for below in value.values() if isinstance(value, dict) else value:
            yield from _named(name, below)


# --- the next call


def _find_next_call(request: ChatRequest, question: Question) -> ToolExecutionRequest | None:
    if request.tool_choice == "none":
        return None
    called = {each.name for each in question.calls}
    forced = None if request.tool_choice == "auto" else request.tool_choice
    tools = [each for each in request.tool_specifications if each.name not in called]
    if forced is not None and forced != "required":
        tools = [each for each in tools if each.name == forced]
    for tool in tools:
        schema = readable(dict(tool.parameters))
        if (arguments := _arguments_for(schema, question)) is not None:
            break
    else:
        if forced is None or called or not tools:
            return None
        tool, schema = tools[0], readable(dict(tools[0].parameters))
        arguments = _example(schema, question, question.text, question.unused_values())
    return ToolExecutionRequest(f"demo_{question.calls_before + 1}", tool.name, compact_json(arguments))


def _arguments_for(schema: Schema, question: Question) -> dict[str, Any] | None:
    """Return arguments that fit `schema`, or None if a required argument cannot be filled."""
    values, texts = question.unused_values(), question.unused_texts()
    arguments: dict[str, Any] = {}
    for name, each in schema.get("properties", {}).items():
        found = question.find_result(name, each)
        if found is _MISSING and name in schema.get("required", ()):
            found = _find_value(each, question.text, values)
            if found is _MISSING and "string" in _types(each):
                found = next((text for text in texts if _fits(text, each)), _MISSING)
            if found is _MISSING:
                return None
            if isinstance(found, str) and found in texts and found != question.text:
                texts.remove(found)
        if found is not _MISSING:
            arguments[name] = found
    return arguments


# --- values in the user's text

# ISO dates are matched before numbers. A `-` directly before a digit is its sign.
_VALUE = re.compile(
    r"(?<!\d)\d{4}-\d{2}-\d{2}(?:T\d{2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?(?:Z|[+-]\d{2}:\d{2})?)?(?!\d)"
    r"|-?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?"
)
_LONGEST_VALUE = 40


def _find_values(text: str) -> list[str]:
    """Return the dates and numbers of a text, in order, the numbers without commas."""
    return [found.replace(",", "") for found in _VALUE.findall(text) if len(found) <= _LONGEST_VALUE]


def _find_number(value: str) -> object:
    try:
        return float(value) if "." in value else int(value)
    except ValueError:
        return _MISSING


def _find_value(schema: object, text: str, values: list[str]) -> object:
    """Return an enum's value, a number or a date from the user's text, and remove it from `values`."""
    options = _alternatives(schema)
    for choice in (each for option in options for each in _choices(option) if isinstance(each, (str, int))):
        if choice != "" and re.search(rf"(?<!\w){re.escape(str(choice))}(?!\w)", text, re.IGNORECASE):
            return choice
    for option in (each for each in options if not _choices(each)):
        for value in values:
            found = _number_or_date(value, option)
            if found is not _MISSING and _fits(found, option):
                values.remove(value)
                # A `Decimal` keeps its digits: 7.50.
                keeps_digits = isinstance(found, float) and str(found) != value and _fits(value, schema)
                return value if keeps_digits else found
    return _MISSING


def _number_or_date(value: str, schema: Schema) -> object:
    """Return `value` as the number or the date that the schema wants, or `_MISSING`."""
    if (form := schema.get("format")) in ("date", "date-time"):
        try:
            datetime.fromisoformat(value)
        except ValueError:  # a number, or a day that is not in the calendar
            return _MISSING
        return value[:10] if form == "date" else value
    number = _find_number(value) if {"integer", "number"} & set(_types(schema)) else _MISSING
    return int(number) if "integer" in _types(schema) and isinstance(number, float) and number.is_integer() else number


# --- the answer


def _write_answer(request: ChatRequest, question: Question) -> str:
    if question.results:
        text = _sentence_of(question.results[-3:])
    elif request.tool_specifications and request.tool_choice != "none":
        names = ", ".join(each.name for each in request.tool_specifications)
        text = f"I cannot answer that: I found no values for the arguments of my tools ({names})."
    else:
        text = _extracted(question) or (
            f"This is a demo model without tools. It can only repeat your message: {question.text.strip()}"
        )
    schema = request.response_format.schema if request.response_format is not None else _schema_in(question)
    if schema is None:
        return text
    return compact_json(_example(readable(dict(schema)), question, text, question.unused_values()))


def _sentence_of(results: Sequence[ToolExecutionResultMessage]) -> str:
    failed = results[-1].is_error or _is_nothing(_read_value(results[-1].text))
    opening = "I am sorry, I could not find an answer." if failed else "Here is what I found."
    return " ".join([opening, *(f"{_phrase_of(each)}." for each in results)])


def _phrase_of(result: ToolExecutionResultMessage) -> str:
    title, value = result.tool_name.replace("_", " "), _read_value(result.text)
    if value is _DONE:
        return f"{title} is done"
    if _is_nothing(value) and not result.is_error:
        return f"{title} found nothing"
    return f"{title}{' failed' if result.is_error else ''}: {_speak_value(value).rstrip('.')}"


def _is_nothing(value: object) -> bool:
    """Return True if a result contains no value, such as `{"results": []}`."""
    if isinstance(value, (dict, list)):
        return all(map(_is_nothing, value.values() if isinstance(value, dict) else value))
    return value is None or value == ""


def _speak_value(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{str(key).replace('_', ' ')} {_speak_value(each)}" for key, each in value.items())
        case list():
            between = "; " if any(isinstance(each, (dict, list)) for each in value) else " / "
            return between.join(map(_speak_value, value))
        case _:
            return str(value)


# --- names in the user's text

_NOUNS = re.compile(r"(?<![^\W_])(?:name|city|town|place|country|person)(?![^\W_])", re.IGNORECASE)
_ASKS = re.compile(r"\b(?:extract|find|identify|answer|return|only|which|what)\w*\b[^.?!\n]*", re.IGNORECASE)
_ABSENT = re.compile(r"[\"'“‘`]([^\"'”’`\n]+)[\"'”’`]\s*,?\s+(?:if|when|otherwise)")
# A row of words with capital letters. Some names have lower-case words inside: Rio de Janeiro.
_CAPITAL = r"(?!(?:I|\w+day)\b)[^\W\d_a-z](?:[\w-]|['’](?!s\b))*(?:\.(?=\s[^\W\d_a-z]))?"
_NAME = rf"({_CAPITAL}(?: (?:(?:d[aeio]|del|la) )?{_CAPITAL})*)"
_PLACES_OF_NAMES = (
    re.compile(rf"(?<!\w)(?i:in|at|near)\s+(?:the (?:city|town) of )?{_NAME}"),
    re.compile(rf"(?<!\w)(?i:for|to|from|of|about|is)\s+{_NAME}"),
    re.compile(rf"^{_NAME}(?:\s+\w+)?\W*$"),  # little else is said
    re.compile(rf"(?<=[\w,] ){_NAME}"),  # not only the first word of a sentence
    re.compile(r"(?<!\w)(?:in|at|near)\s+(?!the\b|my\b)([^\W\d_]{3,})"),
)


def _extracted(question: Question) -> str | None:
    """Return the name that the prompt asks to extract, None if it does not ask."""
    subject = _subject_of(question)
    before = question.text.strip().removesuffix(subject)
    for instruction, texts in ((question.system, (subject, question.text)), (before, (subject,))):
        if any(_NOUNS.search(asked) for asked in _ASKS.findall(instruction)):
            absent = _ABSENT.search(instruction)
            found = next(filter(None, map(_name_in, texts)), None)
            return found or (absent[1] if absent else "unknown")
    return None


def _subject_of(question: Question) -> str:
    """Return the user's text without an instruction before it, as in `Extract the city: Is it hot in Rome?`."""
    without_schema = "".join(each for each in question.text.splitlines(keepends=True) if not each.startswith("{"))
    return re.split(r":\s", without_schema.strip())[-1]


def _name_in(text: str) -> str | None:
    found = next((found for place in _PLACES_OF_NAMES if (found := place.search(text))), None)
    return None if found is None else found[1].title() if found[1].islower() else found[1]


# --- JSON schemas, with their references resolved

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (NoneType,),
    "array": (list,),
    "object": (dict,),
}
_FORMATS = {
    "date": re.compile(r"\d{4}-\d{2}-\d{2}"),
    "date-time": re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}.*"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
}
_PLAINEST = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00",
    "string": "",
    "integer": 0,
    "number": 0,
    "boolean": False,
    "null": None,
}


def _alternatives(schema: object) -> list[Schema]:
    """Return the members of a union and of the unions in it; otherwise the schema itself."""
    if not isinstance(schema, Mapping):
        return [{}]
    members = schema.get("anyOf") or schema.get("oneOf")
    return [option for each in members for option in _alternatives(each)] if members else [schema]


def _types(schema: object) -> list[str]:
    """Return the types that a schema allows; empty if it has no `type`."""
    kinds = [each.get("type", ()) for each in _alternatives(schema)]
    return [kind for each in kinds for kind in ([each] if isinstance(each, str) else each)]


def _choices(schema: Schema) -> Sequence[object]:
    return schema.get("enum") or ([schema["const"]] if "const" in schema else ())


def _fits(value: object, schema: object) -> bool:
    """Return True if `value` has the type, is one of the choices, and is within the bounds of the schema."""
    return any(_fits_option(value, each) for each in _alternatives(schema))


def _fits_option(value: object, schema: Schema) -> bool:
    kinds, choices = _types(schema), _choices(schema)
    if (kinds and not any(type(value) in _TYPES.get(each, ()) for each in kinds)) or (choices and value not in choices):
        return False
    match value:
        case str():
            form = _FORMATS.get(schema.get("format", ""))
            long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            return long_enough and (form is None or form.fullmatch(value) is not None)
        case int() | float():
            return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        case list():
            return all(_fits(each, schema.get("items")) for each in value)
        case dict():
            properties = schema.get("properties", {})
            return all(name in value for name in schema.get("required", ())) and all(
                _fits(each, properties.get(name)) for name, each in value.items()
            )
        case _:
            return True


def _example(schema: object, question: Question, text: str, values: list[str], name: str = "") -> Any:
    """Return a value of `schema`, with its required properties only.

    It comes from results, the user's text (`values` are its numbers and dates) or `text`, the answer in words.
    """
    options = _alternatives(schema)
    option = next((each for each in options if "null" not in _types(each)), options[0])
    if "properties" in option or "object" in _types(option):
        properties, required = option.get("properties", {}), option.get("required", ())
        return {key: _example(properties[key], question, text, values, key) for key in properties if key in required}
    found = question.find_result(name, option)
    if found is _MISSING:
        found = _find_value(option, question.text, values)
    if found is _MISSING and "string" in _types(option):
        found = (_name_in(_subject_of(question)) if _NOUNS.search(name) else None) or text
    if found is not _MISSING and _fits(found, option):
        return found
    if "array" in _types(option):
        return [_example(option["items"], question, text, values, name)] if "items" in option else []
    plainest = (
        *_choices(option),
        *(_PLAINEST[each] for each in (option.get("format"), *_types(option)) if each in _PLAINEST),
    )
    return plainest[0] if plainest else ""


def _schema_in(question: Question) -> Schema | None:
    """Return the JSON schema in a prompt: services show it in a line to models that do not support schemas."""
    for line in (*question.text.splitlines(), *question.system.splitlines()):
        value = _read_value(line) if line.startswith("{") else None
        if isinstance(value, dict) and value.keys() & {"properties", "$defs", "enum"}:
            return value
    return None
