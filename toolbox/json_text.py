"""JSON written by models: strict parsing, exact numbers, and a few repairs of tool arguments.

Not here: decoding of arguments for a tool (`tools.codec`), assembly of streamed replies (`models`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from pydantic_core import PydanticSerializationError, from_json, to_jsonable_python

from .schemas import MEMBER_NAMES

# The closing quote is optional: without it, the rest is one long string, and matching stays linear.
_STRING_OR_COMMA = re.compile(r'"(?:[^"\\]++|\\.)*+"?|,(?=[ \t\r\n]*[}\]])', re.DOTALL)
_STRING_OR_BRACKET = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"?(?:[ \t\r\n]*+(:))?|\{|\[|\}|\]', re.DOTALL)
_CONTROL = re.compile("[\x00-\x1f]")
_SPACE = " \t\r\n"


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text (RFC 8259): no NaN, nothing after the value. Raises `ValueError`.

    Deep nesting and lone surrogates, which the fast parser rejects, are left to the standard library.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as refusal:
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise ValueError(str(refusal)) from None


def strict_arguments(text: str) -> dict[str, Any] | None:
    """Return the object in a valid arguments text, or None. Repairs nothing.

    Empty, blank and `null` text is `{}`; an object encoded twice, as a JSON string, is decoded.
    """
    try:
        value = parse_json(_unwrap_text(text))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def arguments_text(text: str) -> str:
    """Return the JSON object in an arguments text, as text. Raises `ValueError` with the reason.

    Repairs exactly these mistakes: the forms that `strict_arguments` accepts, trailing commas, raw control characters
    such as line breaks inside strings, halves of characters, a leading `{}` before the object, the same object twice.
    Everything else is kept as written, including all digits of numbers.
    """
    text = _without_lone_escapes(_unwrap_text(text))
    try:
        value = parse_json(text)
    except ValueError as error:
        repaired = _find_one_object(text) or _find_one_object(_repair_text(text))
        if repaired is None:
            raise ValueError(f"not a JSON object: {error}") from None
        return repaired
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {_name_kind(value)}")
    return text


def value_text(text: str) -> str:
    """Return the text of one JSON value with the repairs of `arguments_text`. Raises `ValueError`, also for a name that
    occurs twice in an object.
    """
    if (name := doubled_name(text)) is not None:
        raise ValueError(f"the name {name[:100]!r} occurs twice")
    try:
        parse_json(text)
    except ValueError:
        text = _repair_text(text)
        parse_json(text)
    return text


def read_arguments(text: str, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of a tool call, parsed from `arguments_text`. Raises `ValueError` with the reason.

    With a `schema`, strings that it does not allow are repaired as described in `as_wanted`.
    """
    value: dict[str, Any] = parse_json(arguments_text(text))
    if schema is not None:
        value = as_wanted(value, schema, None, lambda inner: parse_json(value_text(inner)))
    return value


def doubled_name(text: str) -> str | None:
    """Return a name that occurs twice in one object of an arguments text, at any depth; None if there is none.

    Parsers disagree about which of the values counts. Two readers of the same text, such as a check and a tool, could
    therefore see different arguments. The text may be invalid: this is asked before anything is repaired.
    """
    if _is_flat(text):
        return None
    text = _unwrap_text(text)
    names: list[set[str]] = []  # of each open object or list
    for found in _STRING_OR_BRACKET.finditer(text):
        string, colon = found.groups()
        if colon and names:
            name = _unescape_string(string) if "\\" in string else string
            if name in names[-1]:
                return name
            names[-1].add(name)
        elif string is None:
            if found[0] in "{[":
                names.append(set())
            elif names:
                names.pop()
    return None


def _is_flat(text: str) -> bool:
    """Return True for an object whose names all differ, without objects and colons in its values: most arguments.

    The parser tells it in 1 µs, and the search through the text in 8: see a tool call in `benchmarks.tools`.
    """
    try:
        members = from_json(text)
    except (ValueError, TypeError):  # TypeError: a text with a lone surrogate
        return False
    return isinstance(members, dict) and len(members) == text.count(":")


def _unescape_string(string: str) -> str:
    """Return the text of a JSON string without its quotes; an invalid one unchanged."""
    try:
        text: str = json.loads(f'"{string}"', strict=False)
    except ValueError:
        return string
    return text


def object_text(text: str) -> str:
    """Return `text` if it is a JSON object, the repaired object, or `{}`.

    Use it for messages in a history: servers reject every request with invalid arguments in its history.
    """
    try:
        return arguments_text(text)
    except ValueError:
        return "{}"


def compact_json(value: Mapping[str, Any] | Any) -> str:
    """Return `value` as JSON without spaces. Keeps non-ASCII characters; escapes lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() or _is_encodable(text) else json.dumps(value, separators=(",", ":"))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- half characters


_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def whole_characters(text: str) -> str:
    """Return `text` with surrogate pairs joined and lone surrogates replaced by U+FFFD.

    A lone surrogate is one half of a character of UTF-16: UTF-8 cannot encode it, and strict servers refuse its escape.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def whole_json(value: Any) -> str:
    """Return `value` as compact JSON, with the characters of its texts as `whole_characters` has them.

    Raises `TypeError`, `ValueError` or `RecursionError` for values that JSON does not support.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=as_json_value)
    return whole_characters(text)


def is_half_a_character(error: Exception) -> bool:
    """Return True if pydantic did not write a value as JSON because of a lone surrogate; `whole_json` writes it."""
    return "surrogates not allowed" in str(error)


def written_by(serializer: Any, value: Any, **options: Any) -> bytes:
    """Return a value as JSON, written by a serializer of pydantic; its characters are as in `whole_json`."""
    try:
        text: bytes = serializer.to_json(value, **options)
    except PydanticSerializationError as error:
        if not is_half_a_character(error):
            raise
        text = whole_json(serializer.to_python(value, mode="json", **options)).encode()
    return text


def as_json_value(value: object) -> Any:
    """Return the JSON value of an object that the standard library cannot write, such as a date or a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError as error:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON") from error


def _without_lone_escapes(text: str) -> str:
    """Return a JSON text with the characters that it has, or has escaped, as `whole_characters` has them."""
    text = whole_characters(text)
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda escape: "\\ufffd" if escape[1] else escape[0], text)


def _unwrap_text(text: str) -> str:
    """Return `{}` for empty arguments, the content of a JSON string, or the text itself."""
    bare = text.strip()
    if bare.startswith('"'):
        try:
            value = parse_json(text)
        except ValueError:
            try:
                value = parse_json(_repair_text(text))
            except ValueError:
                return text
        text = value if isinstance(value, str) else text
        bare = text.strip()
    return "{}" if bare in ("", "null") else text


def _find_one_object(text: str) -> str | None:
    """Return the object in `text`, which may occur twice and after a leading `{}`; None for anything else."""
    objects: list[tuple[str, str]] = []  # the text as written, and a comparable form
    if doubled_name(text) is not None:
        return None
    position = 0
    while rest := text[position:].lstrip(_SPACE):
        if len(objects) == 3:
            return None
        try:
            value, length = _decoder.raw_decode(rest)
            compared = json.dumps(value, sort_keys=True)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        objects.append((rest[:length], compared))
        position = len(text) - len(rest) + length
    if len(objects) > 1 and objects[0][1] == "{}":
        del objects[0]
    if len(objects) > 2 or len({compared for _, compared in objects}) != 1:
        return None
    return objects[0][0]


def _repair_text(text: str) -> str:
    """Return `text` without trailing commas, and with the control characters in its strings escaped."""
    return _STRING_OR_COMMA.sub(_repair_piece, text)


def _repair_piece(found: re.Match[str]) -> str:
    piece = found.group()
    if piece.startswith(","):
        return ""
    return piece if piece.isprintable() else _CONTROL.sub(lambda each: f"\\u{ord(each.group()):04x}", piece)


def _name_kind(value: object) -> str:
    match value:
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "null"


# --- exact numbers


class ExactNumber(str):
    """A number exactly as written in a JSON text."""


def parsed_exactly(text: str) -> Any:
    """Parse JSON; numbers become strings of a subclass, exactly as written. Raises `ValueError`."""
    return json.loads(text, parse_int=ExactNumber, parse_float=ExactNumber)


def written_exactly(value: Any) -> str:
    """Return a value of `parsed_exactly` as JSON."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{written_exactly(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written_exactly, value)) + "]"
    return str(value) if isinstance(value, ExactNumber) else json.dumps(value)


# --- repairs with a schema

_DEEPEST = 100


def as_wanted(
    value: Any, schema: Mapping[str, Any], wrong: Collection[str] | None, parse: Callable[[str], Any] | None
) -> Any:
    """Return `value` with strings that `schema` does not allow converted to an allowed value.

    A value or a name of an enum, or a value of a `Literal`, written in another way becomes the value that it means
    (`meant_by`), also as a key of an object. JSON text is parsed with `parse` where the schema requires an object or
    list; without `parse` it is kept. Only strings in `wrong` are changed (None: all), and never where any string is
    allowed. Values that cannot be repaired are kept.
    """
    return _Wanted(schema.get("$defs", {}), wrong, parse).value(value, [schema], 0)


class _Wanted:
    def __init__(
        self, definitions: Mapping[str, Any], wrong: Collection[str] | None, parse: Callable[[str], Any] | None
    ) -> None:
        self.definitions, self.wrong, self.parse = definitions, wrong, parse

    def value(self, value: Any, schemas: Iterable[Any], depth: int) -> Any:
        """Return the value converted to one of these schemas."""
        if depth > _DEEPEST:
            return value
        options = list(self._find_options(schemas))
        if type(value) is str:
            return self._convert_string(value, options, depth)
        if isinstance(value, dict):
            options = [each for each in options if not _contradicts(each, value)] or options
            names = list(self._find_options(each["propertyNames"] for each in options if "propertyNames" in each))
            folded = Counter(map(str.casefold, value)) if names else Counter()
            return {
                self._convert_key(key, names) if folded[key.casefold()] == 1 else key: self.value(
                    each, _find_properties(options, key), depth + 1
                )
                for key, each in value.items()
            }
        if isinstance(value, list):
            return [self.value(each, _find_items(options, index), depth + 1) for index, each in enumerate(value)]
        return value

    def _find_options(self, schemas: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the alternatives of these schemas with references and unions resolved."""
        waiting, seen = list(schemas)[::-1], set[str]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping):
                yield {}
            elif "$ref" in schema:
                if schema["$ref"] not in seen:
                    seen.add(schema["$ref"])
                    waiting.append(self.definitions.get(schema["$ref"].rpartition("/")[2], {}))
            elif "anyOf" in schema or "oneOf" in schema:
                waiting += [*schema.get("anyOf", ()), *schema.get("oneOf", ())][::-1]
            else:
                yield schema

    def _convert_string(self, text: str, options: list[Mapping[str, Any]], depth: int) -> Any:
        if (self.wrong is not None and text not in self.wrong) or any(map(_allows_any_string, options)):
            return text
        listed, names = _find_listed(options)
        meant = meant_by(text, listed, names)
        if meant is not None:
            return meant
        if self.parse is None:
            return text
        kinds = {kind for each in options for kind in _read_kinds(each)}
        opening = text.lstrip()[:1]
        if (opening == "{" and "object" in kinds) or (opening == "[" and "array" in kinds):
            try:
                parsed = self.parse(text)
            except (ValueError, RecursionError):
                return text
            return _Wanted(self.definitions, None, self.parse).value(parsed, options, depth + 1)
        return text

    def _convert_key(self, key: str, names: list[Mapping[str, Any]]) -> str:
        if (self.wrong is not None and key not in self.wrong) or any(map(_allows_any_string, names)):
            return key
        meant = meant_by(key, *_find_listed(names))
        return key if meant is None else str(meant)


def _read_kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _read_listed(schema: Mapping[str, Any]) -> Sequence[Any]:
    return (schema["const"],) if "const" in schema else schema.get("enum", ())


def _allows_any_string(schema: Mapping[str, Any]) -> bool:
    if "enum" in schema or "const" in schema:
        return False
    kinds = _read_kinds(schema)
    return "string" in kinds or not (kinds or "properties" in schema or "items" in schema)


def _contradicts(schema: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Return True if a field, such as the kind of a union's member, has none of the values that the schema lists."""
    listed = {
        name: _read_listed(each) for name, each in schema.get("properties", {}).items() if isinstance(each, Mapping)
    }
    given = ((value[name], allowed) for name, allowed in listed.items() if allowed and name in value)
    return any(each not in allowed and meant_by(str(each), allowed) is None for each, allowed in given)


def _find_listed(options: Iterable[Mapping[str, Any]]) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Return the values that these schemas list, and the names of enums with their values."""
    listed: list[Any] = []
    names: list[tuple[str, Any]] = []
    for each in options:
        listed += _read_listed(each)
        names += each.get(MEMBER_NAMES, {}).items()
    return listed, names


def meant_by(text: str, listed: Iterable[Any], names: Iterable[tuple[str, Any]] = ()) -> Any:
    """Return the only value that `text` can mean; None if there is none or more than one.

    An exact value comes first, then a value written in another way, then a name: in any case, and with hyphens,
    underscores and blanks alike.
    """
    values = [(str(each), each) for each in listed if each is not None]
    for value in (each for _, each in values if each == text):
        return value
    wanted = _fold_case(text)
    for spelled in (values, names):
        if found := {str(value): value for name, value in spelled if _fold_case(name) == wanted}:
            return next(iter(found.values())) if len(found) == 1 else None
    return None


_GAPS = re.compile(r"[-_\s]+")


def _fold_case(text: str) -> str:
    return _GAPS.sub(" ", text).casefold()


def _find_properties(options: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the schemas for this key of an object."""
    found = []
    for each in options:
        properties = each.get("properties", {})
        if key in properties:
            found.append(properties[key])
        elif "object" in _read_kinds(each) or "properties" in each:
            found.append(each.get("additionalProperties", {}))
    return found


def _find_items(options: Iterable[Mapping[str, Any]], index: int) -> list[Any]:
    """Return the schemas for this index of a list."""
    found = []
    for each in options:
        first = each.get("prefixItems", ())
        if index < len(first):
            found.append(first[index])
        elif "array" in _read_kinds(each) or "items" in each:
            found.append(each.get("items", {}))
    return found
