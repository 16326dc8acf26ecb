"""Values for the demo model: found in a prompt by rules for English, and checked against JSON schemas.

Not here: planning tool calls (`DemoChatModel`), making a schema from a Python type (`tools.specification`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
    for words, pattern in _PATTERNS:
        if words.search(kind):
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
