"""`DemoChatModel`: plans tool calls and writes answers by rules, without a language model.

Its values come from the prompt, by a few rules for English, and fit the schemas of the tools. Not here: a model that
follows a script (`toolbox.testing`).
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
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
    ToolSpecification,
    UserMessage,
)
from .chat_streams import events_of, words
from .json_text import compact_json, parse_json, strict_arguments

__all__ = ["DemoChatModel"]


Schema: TypeAlias = Mapping[str, Any]


class DemoChatModel(ChatModel):
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


# --- values from the prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """The system message and the user's message."""

    system: str
    user: str

    @property
    def subject(self) -> str:
        """The text to search: the user's message without an instruction or a label before it."""
        for label in (_LABEL, _TASK):
            *_, rest = label.split(self.user)
            if rest.strip() and rest != self.user:
                return rest.strip()
        return self.user


_TASK = re.compile(r"\b(?:extract|identify|find|detect|determine)\w*\b[^:\n]*[:\n]", re.IGNORECASE)
_LABEL = re.compile(r"\b(?:question|text|message|input|sentence|review|query)\s*:\s", re.IGNORECASE)
_ASKS = re.compile(
    r"\b(?:extract|identif|find|detect|determine|answer|return|only|just|which|what)\w*\b(?P<thing>[^.?!\n]*)",
    re.IGNORECASE,
)
_ABSENT = re.compile(r"[\"'“‘`]([^\"'”’`\n]+)[\"'”’`]\s*,?\s+(?:if|when|otherwise)")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)?(?!\w)")
_DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+")
_KINDS = (
    (re.compile(r"\be-?mail"), _EMAIL),
    (re.compile(r"\b(?:url|link|website)\b"), re.compile(r"https?://\S+")),
    (re.compile(r"\b(?:date|day)\b"), _DATE),
    (re.compile(r"\b(?:number|amount|price|age|year|count|quantity|id|total)\b"), _NUMBER),
)
_NAMES = re.compile(r"\b(?:name|city|town|place|location|country|person|company|product|customer|user)\b")
_WORDS_OF_ANSWER = {"value", "answer", "text", "message", "reply", "response", "summary", "result", "content"}


def answer(prompt: Prompt) -> str:
    """Return what the prompt asks to extract, else the text it asks for if nothing is found, else an echo."""
    for instruction in (prompt.system, prompt.user.removesuffix(prompt.subject)):
        for asked in _ASKS.finditer(instruction):
            thing = asked["thing"].lower()
            if _NAMES.search(thing) or any(mentioned.search(thing) for mentioned, _ in _KINDS):
                absent = _ABSENT.search(instruction)
                return extract(thing, prompt.subject) or (absent[1] if absent else "unknown")
    return f"This is a demo model without tools. It can only repeat your message: {prompt.user.strip()}"


def extract(wanted: str, text: str) -> str | None:
    """Return the first match for `wanted` in `text`: an address, a number, a date, else a name."""
    for mentioned, pattern in _KINDS:
        if mentioned.search(wanted):
            return found.group().rstrip(".,") if (found := pattern.search(text)) else None
    return find_name(text, is_place="person" not in wanted and "customer" not in wanted)


def scalar_for(name: str | None, schema: Schema, prompt: Prompt, text: str | None) -> object:
    """Return a value for a field of a structured answer, found in the prompt by the field's name and type, or None.

    `text` is the answer in words, for fields such as `answer` or `summary`.
    """
    subject, kinds = prompt.subject, types_of(schema)
    if choices := schema.get("enum"):
        return next((each for each in choices if str(each).lower() in subject.lower()), choices[0])
    if "integer" in kinds or "number" in kinds:
        wanted = (float(each.replace(",", ".")) for each in _NUMBER.findall(subject))
        return next((int(each) if each.is_integer() else each for each in wanted), None)
    if "string" not in kinds:
        return None
    if str(schema.get("format")) in ("date", "date-time"):
        return found.group() if (found := _DATE.search(subject)) else "2000-01-01"
    if name is None or name in _WORDS_OF_ANSWER:
        return text if text is not None else prompt.user
    described = f"{name.replace('_', ' ')} {schema.get('description') or ''}".lower()
    return extract(described, subject) or text or prompt.user


# --- names

# A name is a row of words with capital letters. Some names have lower-case words inside: Rio de Janeiro.
_CAPITAL = r"(?!(?i:I|I'm|today|tomorrow|\w+day|next|this)\b)[^\W\d_a-z][\w'’-]*(?:\.(?=\s[^\W\d_a-z]))?"
_NAME = rf"{_CAPITAL}(?: (?:(?:de|la|le|do|da|del|di|der|am|of|the) )*{_CAPITAL})*"
_AFTER_PREPOSITION = tuple(
    re.compile(rf"(?<![\w'’])(?i:{words})\s+(?:the\s+)?(?:(?:city|town|capital) of\s+)?({_NAME})")
    for words in ("in|at|near", "for|to|from|of|about|is")
)
_INTRODUCED = re.compile(rf"(?:[Nn]ame(?:'s| is)|I am|I'm|called|[Mm]et|[Mm]eet|Mr\.?|Mrs\.?|Ms\.?|Dr\.?)\s+({_NAME})")
_OPENER = re.compile(
    r"(?i:what|how|is|are|was|will|would|could|can|should|do|does|did|has|have|when|where|which|who|why|tell|give|show"
    r"|please|hi|hello|hey|it|if|the|a|an|and|but|so|then|let|find|get|forecast|weather|temperature|question|yesterday)"
    r"(?:['’]s)?\b"
)
_LOWER_CASE = re.compile(r"\b(?:in|at|near)\s+(?!the\b|my\b)([^\W\d_]{3,})")


def find_name(text: str, *, is_place: bool) -> str | None:
    """Return a name in `text`: for a place the one after a preposition, else any that does not only open a sentence."""
    patterns = _AFTER_PREPOSITION if is_place else (_INTRODUCED,)
    for pattern in patterns:
        if found := pattern.search(text):
            return _without_possessive(found[1], text[found.end() :])
    for found in re.finditer(_NAME, text):
        name = found.group()
        while opener := _OPENER.match(name):
            name = name[opener.end() :].lstrip(" ,")
        if name:
            return _without_possessive(name, text[found.end() :])
    lower = _LOWER_CASE.search(text)
    return lower[1].title() if lower else None


def _without_possessive(name: str, rest: str) -> str:
    """Return London for "London's weather"; "St. John's tomorrow?" keeps its end."""
    owns = re.match(r" (?!today|tomorrow|on|this|next)\w", rest)
    return re.sub(r"['’]s$", "", name) if owns else name


# --- JSON schemas


def resolved(schema: object, root: Schema) -> Schema:
    """Return `schema` with its `$ref` resolved in `root`; `{}` if it is not a schema or the reference is circular."""
    for _ in range(20):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: object = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        schema = target
    return {}


def types_of(schema: Schema) -> tuple[str, ...]:
    """Return the types of a schema; empty if it has no `type`."""
    kind = schema.get("type")
    return (kind,) if isinstance(kind, str) else tuple(kind) if isinstance(kind, list) else ()


def branches(schema: Schema) -> Sequence[object]:
    """Return the alternatives of a schema (`anyOf` or `oneOf`)."""
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else ()


def fits(value: object, schema: object, root: Schema) -> bool:
    """Return True if `value` has the type, is one of the choices, and is within the bounds of the schema."""
    schema = resolved(schema, root)
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if choices is not None and value not in choices:
        return False
    kinds = types_of(schema)
    if kinds and not any(isinstance(value, _TYPES[kind]) for kind in kinds if kind in _TYPES):
        return False
    if isinstance(value, bool) and kinds and "boolean" not in kinds:
        return False
    if (found := branches(schema)) and not any(fits(value, each, root) for each in found):
        return False
    if isinstance(value, str):
        form = _FORMATS.get(str(schema.get("format")))
        long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return long_enough and (form is None or form.fullmatch(value) is not None)
    if isinstance(value, (int, float)):
        if kinds and "number" not in kinds and "integer" in kinds and value != int(value):
            return False
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    if isinstance(value, list):
        return all(fits(each, schema.get("items", {}), root) for each in value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return all(name in value for name in schema.get("required", ())) and all(
            fits(each, properties.get(name, {}), root) for name, each in value.items()
        )
    return True


_TYPES: dict[str, Any] = {
    "string": str,
    "number": (int, float),
    "integer": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
_FORMATS = {
    "date": re.compile(r"\d{4}-\d{2}-\d{2}"),
    "date-time": re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}.*"),
    "time": re.compile(r"\d{2}:\d{2}.*"),
    "email": re.compile(r"[^@\s]+@[^@\s]+"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "uri": re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:\S+"),
}


def example(schema: object, root: Schema, fill: Callable[[str | None, Schema], object], name: str | None = None) -> Any:
    """Return a value of `schema`: each scalar is `fill(property name, schema)` if valid, else a default of its type."""
    schema = resolved(schema, root)
    if alternatives := branches(schema):
        chosen = next((each for each in alternatives if types_of(resolved(each, root)) != ("null",)), alternatives[0])
        return example(chosen, root, fill, name)
    kinds = types_of(schema)
    if "object" in kinds or "properties" in schema:
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        return {key: example(each, root, fill, key) for key, each in properties.items() if key in required}
    filled = fill(name, schema)
    if filled is not None and fits(filled, schema, root):
        return filled
    if "array" in kinds:
        return [example(schema["items"], root, fill, name)] if "items" in schema else []
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    return next((_PLAINEST[kind] for kind in kinds if kind in _PLAINEST), "")


def schema_in(text: str) -> dict[str, Any] | None:
    """Return the JSON schema in a prompt, or None."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and ("properties" in value or "$defs" in value or "enum" in value):
            return value
    return None


_PLAINEST: dict[str, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False, "null": None, "array": []}


def values_named(name: str, value: object) -> Iterator[object]:
    """Yield the values of properties called `name`, at any depth of objects and lists, outer ones first."""
    level = [value]
    while level:
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                if name in each:
                    yield each[name]
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = below
