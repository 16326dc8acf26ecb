"""`DemoChatModel`: plans tool calls and writes answers by rules, without a language model.

Its values come from the prompt, by rules for English, and fit the JSON schemas of the tools. Not here: a model that
follows a script (`toolbox.testing`), making a schema from a Python type (`tools.specification`).
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


# --- values from the prompt


Schema: TypeAlias = Mapping[str, Any]


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """The system message and the user's message."""

    system: str
    user: str


def answer(prompt: Prompt) -> str:
    """Return what the prompt asks to extract, else the text it asks for if nothing is found, else an echo."""
    wanted = _wanted(prompt.system) or _asked(prompt.system) or _wanted(prompt.user)
    if wanted is None:
        return f"This is a demo model without tools. It can only repeat your message: {prompt.user.strip()}"
    return extract(wanted, _subject(prompt)) or _when_absent(prompt) or "unknown"


def extract(wanted: str, text: str) -> str | None:
    """Return the first match for `wanted` in `text`: an address, a number, a date, else a name."""
    kind = wanted.lower()
    for mentioned, pattern in _PATTERNS:
        if mentioned.search(kind):
            found = pattern.search(text)
            return found.group().rstrip(".,") if found else None
    if _REGION.search(kind) and (found := _AFTER_COMMA.search(text)):
        return found.group(1)
    if _LOCATION.search(kind) or not _PERSON.search(kind):
        return _name(text, (_PLACE, _ABOUT))
    found = _INTRODUCED.search(text)
    return found.group(1) if found else _name(text, ())


def scalar_for(name: str | None, schema: Schema, prompt: Prompt, text: str | None) -> object:
    """Return a value for a field of a structured answer, found in the prompt by the field's name and type, or None.

    `text` is the answer in words, for fields such as `answer` or `summary`.
    """
    subject = _subject(prompt)
    if choices := schema.get("enum"):
        return next((each for each in choices if str(each).lower() in subject.lower()), choices[0])
    kinds = types_of(schema)
    if "integer" in kinds or "number" in kinds:
        numbers = _NUMBER.findall(subject)
        wanted = (float(each.replace(",", ".")) for each in numbers)
        return next((int(each) if each.is_integer() else each for each in wanted), None)
    if "string" not in kinds:
        return None
    if form := _FORMATS.get(str(schema.get("format"))):
        found = form[0].search(subject)
        return found.group() if found else form[1]
    if name is None or name in _WORDS_OF_ANSWER:
        return text if text is not None else prompt.user
    described = f"{name.replace('_', ' ')} {schema.get('description') or ''}"
    return extract(described, subject) or text or prompt.user


# --- the requested thing, and the text to search

_WANTED = re.compile(
    r"\b(?:extract|identify|detect|find|determine|pick out|recogni[sz]e)(?:s|ing)?\s+"
    r"(?:only\s+|just\s+)?(?:the\s+|an?\s+|any\s+|which\s+|every\s+)?(?P<thing>[\w-]+(?:\s+[\w-]+){0,4})",
    re.IGNORECASE,
)
_ONLY = re.compile(
    r"\b(?:answer|reply|respond|return|give|output)\w*\s+(?:me\s+)?(?:with\s+)?(?:only\s+|just\s+)?(?:with\s+)?"
    r"(?:the|its)\s+(?P<thing>[\w-]+(?:\s+[\w-]+){0,4})",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"\b(?:which|what)\s+(?P<thing>[\w-]+)", re.IGNORECASE)
_LABELLED = re.compile(
    r"\b(?:question|text|message|input|sentence|review|query|here is [^:\n]{0,200})\s*:\s*", re.IGNORECASE
)
_ABSENT = re.compile(
    r"\b(?:reply|replies|answer|return|respond|say|output|write)\w*\s+(?:with\s+)?"
    r"[\"'“‘`]([^\"'”’`\n]+)[\"'”’`]\s*,?\s+(?:if|when|otherwise)",
    re.IGNORECASE,
)


def _wanted(instruction: str) -> str | None:
    found = _WANTED.search(instruction)
    if found is None and instruction.count("\n") < 20:
        found = _ONLY.search(instruction)
        if found is not None and not _KNOWN.search(found["thing"]):
            return None
    return found["thing"] if found else None


def _asked(instruction: str) -> str | None:
    """Return the thing that an instruction asks for in a question, such as "Which city is it about?"."""
    found = _QUESTION.search(instruction)
    return found["thing"] if found and _KNOWN.search(found["thing"]) else None


def _subject(prompt: Prompt) -> str:
    """Return the text to search: the user's message without the instruction before it."""
    user = prompt.user
    labels = list(_LABELLED.finditer(user))
    if labels:
        rest = user[labels[-1].end() :].strip()
        return rest or user
    if _WANTED.search(user):
        _, colon, rest = user.partition(":")
        if colon and rest.strip():
            return rest.strip()
        before, _, last = user.rpartition("\n")
        return last if before and last.strip() else _WANTED.sub("", user)
    return user


def _when_absent(prompt: Prompt) -> str | None:
    found = _ABSENT.search(prompt.system) or _ABSENT.search(prompt.user)
    return found.group(1) if found else None


# --- things with a fixed format

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)?(?![\w])")
_DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+")
_URL = re.compile(r"https?://\S+")
_PATTERNS = (
    (re.compile(r"\be-?mail"), _EMAIL),
    (re.compile(r"\b(?:url|link|website|web address)"), _URL),
    (re.compile(r"\b(?:phone|telephone)"), re.compile(r"\+?\d[\d ()/-]{5,}\d")),
    (re.compile(r"\b(?:date|day)\b"), re.compile(rf"{_DATE.pattern}|\b(?:today|tomorrow|yesterday)\b", re.IGNORECASE)),
    (re.compile(r"\b(?:number|amount|price|age|year|count|quantity|id|total)\b"), _NUMBER),
)
_FORMATS = {
    "date": (_DATE, "2000-01-01"),
    "date-time": (re.compile(rf"{_DATE.pattern}T\S+"), "2000-01-01T00:00:00Z"),
    "email": (_EMAIL, None),
    "uri": (_URL, None),
}
_WORDS_OF_ANSWER = frozenset(
    {"value", "answer", "text", "message", "reply", "response", "summary", "result", "content"}
)

# --- names

_PERSON = re.compile(r"\b(?:person|people|customer|user|author|first name|last name|surname|full name|who)\b")
_LOCATION = re.compile(r"\b(?:city|town|village|place|location|destination)\b")
_REGION = re.compile(r"\b(?:country|state|region)\b")
_KNOWN = re.compile(
    r"\b(?:name|city|town|place|location|country|person|company|product|e-?mail|date|number)\b", re.IGNORECASE
)
_CAPITALISED = r"([^\W\d_a-z][\w'’-]*(?:\s[^\W\d_a-z][\w'’-]*)*)"
_INTRODUCED = re.compile(rf"(?:[Nn]ame(?:'s| is)|I am|I'm|called|Mr\.?|Mrs\.?|Ms\.?|Dr\.?|[Mm]eet)\s+{_CAPITALISED}")
_AFTER_COMMA = re.compile(rf"(?<![\w'’-])[^\W\d_][\w'’-]*+,\s*{_CAPITALISED}")

_PLACE = _set_of("in at near around inside outside within")
_ABOUT = _set_of("for to from of about over visit visiting is")
_ARTICLES = _set_of("the city town capital of")
# Names of places may contain lower-case words of their language: Rio de Janeiro.
_LINKS = _set_of(
    "de la le les lès du des da do dos das del della di van der den dem am an auf of the upon sur en e y el al by"
)
_TIMES = _set_of(
    "today tomorrow yesterday tonight now monday tuesday wednesday thursday friday saturday sunday january "
    "february march april may june july august september october november december morning afternoon evening "
    "night week weekend month year spring summer autumn fall winter christmas easter next this last celsius "
    "fahrenheit utc gmt am pm"
)
_OPENERS = _set_of(
    "what what's whats how how's is are was were will would could can should shall do does did has have when "
    "where where's which who whose why tell give show please hi hello hey i i'm it if the a an and or but so "
    "then let let's find get need want compare forecast weather temperature question answer extract in at for "
    "on my our your there"
)
_FILLERS = _set_of(
    "weather forecast temperature temperatures like going be rain raining snow sunny cold warm hot wind windy "
    "there me about on it's any know"
)
_WORD = re.compile(
    r"(?:St|Ste|Mt|Ft)\.(?=\s[^\W\d_])|(?:[A-Z]\.){2,}|'s-[^\W\d_][\w'’-]*|[^\W\d_][\w'’-]*(?:\.(?=[^\W\d_]))?"
)


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    start: int
    end: int
    opens: bool
    """True if a sentence begins with it."""

    @property
    def key(self) -> str:
        return self.text.lower().strip(".'’")

    @property
    def is_proper(self) -> bool:
        """True if it is written like a name: with a capital letter, or in a script without capital letters."""
        first = self.text.removeprefix("'s-")[:1]
        return first.upper() == first and self.key not in _TIMES


def _name(text: str, near: tuple[frozenset[str], ...]) -> str | None:
    """Return a name in `text`: after one of the prepositions, else anywhere, else in lower case."""
    words = list(_words(text))
    for prepositions in near:
        for found in _after(words, prepositions, text):
            return found
    for at, word in enumerate(words):
        if word.is_proper and not (word.opens and word.key in _OPENERS) and word.key != "i":
            return _sequence(words, at, text)
    return _small(words, text)


def _words(text: str) -> Iterator[_Word]:
    end = 0
    for found in _WORD.finditer(text):
        between = text[end : found.start()]
        opens = end == 0 or any(mark in between for mark in '.?!:;\n"“')
        yield _Word(found.group(), found.start(), found.end(), opens)
        end = found.end()


def _after(words: list[_Word], prepositions: frozenset[str], text: str) -> Iterator[str]:
    for at, word in enumerate(words):
        if word.key not in prepositions:
            continue
        following = at + 1
        while (
            following < len(words)
            and words[following].text in _ARTICLES
            and text[words[following - 1].end : words[following].start].isspace()
        ):
            following += 1
        if following < len(words) and words[following].is_proper and not words[following].opens:
            yield _sequence(words, following, text)


def _sequence(words: list[_Word], at: int, text: str) -> str:
    """Return the name that begins with this word, with further names and the lower-case words between them."""
    end = at
    following = at + 1
    while following < len(words) and text[words[following - 1].end : words[following].start] == " ":
        word = words[following]
        if word.is_proper:
            end = following
        elif word.text not in _LINKS:
            break
        following += 1
    name = text[words[at].start : words[end].end]
    # "London's weather" is about London. "St. John's tomorrow" is ambiguous, so the name stays whole.
    owns = (
        end + 1 < len(words) and words[end + 1].key not in _TIMES and text[words[end].end : words[end + 1].start] == " "
    )
    return re.sub(r"(?:['’]s|['’])$", "", name) if owns else name


def _small(words: list[_Word], text: str) -> str | None:
    """Return a name in lower case: the words after a preposition, else all words without another meaning."""
    stops = _TIMES | _OPENERS | _FILLERS | _PLACE | _ABOUT
    for at, word in enumerate(words):
        if word.key in _PLACE and len(word.key) > 1 and (run := _run(words, at + 1, stops, text)):
            return run.title()
    rest = [word for word in words if word.key not in stops | _ARTICLES]
    return " ".join(word.text for word in rest).title() if 0 < len(rest) <= 3 else None


def _run(words: list[_Word], at: int, stops: frozenset[str], text: str) -> str:
    end = at
    while end < min(at + 3, len(words)) and words[end].key not in stops:
        if end > at and text[words[end - 1].end : words[end].start] != " ":
            break
        end += 1
    return text[words[at].start : words[end - 1].end] if end > at else ""


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
    """Return True if `value` is valid, checked by the keywords that schemas of tool parameters use."""
    schema = resolved(schema, root)
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return False
    if (kinds := types_of(schema)) and not any(_TYPES.get(kind, _never)(value) for kind in kinds):
        return False
    if (found := branches(schema)) and not any(fits(value, each, root) for each in found):
        return False
    if not all(fits(value, each, root) for each in schema.get("allOf", ())):
        return False
    match value:
        case str():
            return _string_fits(value, schema)
        case bool() | None:
            return True
        case int() | float():
            return _number_fits(value, schema)
        case list():
            return _list_fits(value, schema, root)
        case dict():
            return _object_fits(value, schema, root)
    return False


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


def _never(_: object) -> bool:
    return False


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),  # type: ignore[call-overload]  # a number
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _same(left: object, right: object) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _within(size: float, schema: Schema, least: str, most: str) -> bool:
    low, high = schema.get(least), schema.get(most)
    return not ((_is_number(low) and size < low) or (_is_number(high) and size > high))  # type: ignore[operator]  # numbers


def _string_fits(value: str, schema: Schema) -> bool:
    if not _within(len(value), schema, "minLength", "maxLength"):
        return False
    pattern = schema.get("pattern")
    try:
        if isinstance(pattern, str) and not re.search(pattern, value):
            return False
    except re.error:
        pass  # patterns of another dialect are ignored
    form = _FORMAT_PATTERNS.get(str(schema.get("format")))
    return form is None or form.fullmatch(value) is not None


_FORMAT_PATTERNS = {
    "date": re.compile(r"\d{4}-\d{2}-\d{2}"),
    "date-time": re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}.*"),
    "time": re.compile(r"\d{2}:\d{2}.*"),
    "email": re.compile(r"[^@\s]+@[^@\s]+"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "uri": re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:\S+"),
    "duration": re.compile(r"-?P.+"),
}


def _number_fits(value: float, schema: Schema) -> bool:
    if not _within(value, schema, "minimum", "maximum"):
        return False
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if (_is_number(low) and value <= low) or (_is_number(high) and value >= high):  # type: ignore[operator]  # numbers
        return False
    step = schema.get("multipleOf")
    return not (_is_number(step) and step and value % step)


def _list_fits(value: list[Any], schema: Schema, root: Schema) -> bool:
    items = schema.get("items")
    return _within(len(value), schema, "minItems", "maxItems") and (
        not isinstance(items, Mapping) or all(fits(each, items, root) for each in value)
    )


def _object_fits(value: dict[str, Any], schema: Schema, root: Schema) -> bool:
    properties = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    others = schema.get("additionalProperties", True)
    for name, each in value.items():
        if name in properties:
            if not fits(each, properties[name], root):
                return False
        elif others is False or (isinstance(others, Mapping) and not fits(each, others, root)):
            return False
    return True


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
