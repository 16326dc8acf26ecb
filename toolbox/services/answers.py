"""Validates JSON against a type: the answers of models, and the results of tools that come from outside or the store.

Names of enums are recognized, and unions have a `kind`.

In a union of several object types, the `kind` of a JSON object says which of them it is: without it, an object with a
mistake would be read as another member that happens to allow it. Not here: finding the JSON in a reply (`outputs`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Never, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, RootModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.types import Discriminator
from pydantic_core import PydanticCustomError, core_schema, from_json, to_json, to_jsonable_python
from typing_extensions import is_typeddict

from ..chat import ToolExecutionResult
from ..introspection import EMPTY, Unresolved, is_class, is_union, without_alias
from ..json_text import meant_by
from ..schemas import schema_of
from ..tools.codec import with_strings_as_wanted
from ..tools.results import awaited, json_values

KIND = "kind"


class UnsupportedOutput(TypeError):  # noqa: N818 - becomes a problem at start
    """A method cannot return this type; `fix` says what to do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


class AnswerType:
    """A type that JSON from a model is validated against.

    With `parse`, JSON text where the type wants an object or a list is read with it.
    """

    def __init__(self, type_: Any, parse: Callable[[str], Any] | None = None) -> None:
        """Prepare the validation. Raises pydantic's error for an unsupported type, or `UnsupportedOutput`."""
        self.parse = parse
        wanted = with_kinds(type_)
        self.has_kinds = wanted is not type_
        self.adapter: TypeAdapter[Any] = TypeAdapter(wanted)

    @cached_property
    def _schema_with_names(self) -> Mapping[str, Any]:
        return schema_of(self.adapter, with_names=True)

    def read(self, text: str | bytes, *, extra: Literal["forbid"] | None = None) -> tuple[Any, str]:
        """Return the value of a JSON text, and the text with its repairs. Raises `ValidationError`.

        With `extra="forbid"`, all fields must be known.
        """
        text = text if isinstance(text, str) else text.decode()
        try:
            return self.adapter.validate_json(text, extra=extra), text
        except ValidationError as error:
            repaired = with_strings_as_wanted(text, error, lambda: self._schema_with_names, self.parse)
            if repaired is None:
                raise
        return self.adapter.validate_json(repaired, extra=extra), repaired

    def write(self, value: Any, written: str | None = None) -> str:
        """Return a value as JSON; `written` is the text that it was read from.

        That text is kept, because it has all digits and no fields that the model did not write. Without escapes, so
        that a search in it finds what the value contains; and unions always have their `kind`.
        """
        if written is None or self.has_kinds:
            try:
                return self.adapter.dump_json(value, by_alias=True, warnings=False).decode()
            except Exception:  # any exception of the value's own serializers
                return to_json(value, fallback=str).decode() if written is None else written
        return to_json(from_json(written)).decode() if "\\" in written else written


# --- results of tools

_UNKNOWN_RESULTS = (EMPTY, Any, object, Never, NoReturn, ToolExecutionResult)


@cache
def _result_type(returns: Any) -> AnswerType | None:
    """Return the type of a tool's results; None if it is not known, or pydantic does not support it."""
    returned = awaited(returns)
    if returned in _UNKNOWN_RESULTS or isinstance(returned, Unresolved):
        return None
    if hasattr(get_origin(returned) or returned, "__tool_value__"):  # of a service
        returned = next(iter(get_args(returned)), str)
    try:
        return AnswerType(returned)
    except Exception:  # pydantic raises many kinds of exceptions for unsupported types
        return None


def result_type(returns: Any) -> AnswerType | None:
    """Return the type of the results of a tool with this return annotation; None if they can be anything."""
    try:
        return _result_type(returns)
    except TypeError:  # an annotation that cannot be hashed
        return _result_type.__wrapped__(returns)


def accepted_result(returns: Any, value: Any, written: Any) -> Any:
    """Return the JSON of a result that someone supplied in place of a tool. Raises `ValidationError`.

    `value` is what was supplied, `written` its JSON. An object of the program may be clear where its JSON is not.
    """
    known = result_type(returns)
    if known is None:
        return written
    try:
        return json.loads(known.read(json.dumps(written))[1])
    except ValidationError as error:
        try:
            return json.loads(known.adapter.dump_json(known.adapter.validate_python(value), by_alias=True))
        except Exception:  # any exception of the value's own serializers
            raise error from None


def supplied_result(returns: Any, written: Any) -> Any:
    """Return the result in the JSON of `accepted_result`."""
    known = result_type(returns)
    if known is None:
        return written
    try:
        return known.read(json.dumps(written))[0]
    except ValidationError:  # the return type has changed since
        return written


def restored_result(returns: Any, written: Any) -> Any:
    """Return a stored result in the tool's return type; its JSON if pydantic cannot read that, or would lose a part."""
    if written is None:
        return None
    value = supplied_result(returns, written)
    try:
        is_whole = _sort_lists(json_values(value)) == _sort_lists(written)
    except Exception:  # any exception of the value's own serializers
        return written
    return value if is_whole else written


def _sort_lists(written: Any) -> Any:
    """Return JSON with its lists in one order: sets are written in any order."""
    if isinstance(written, dict):
        return {key: _sort_lists(each) for key, each in written.items()}
    if isinstance(written, list):
        return sorted(map(_sort_lists, written), key=lambda each: json.dumps(each, sort_keys=True))
    return written


# --- unions of object types


def with_kinds(annotation: Any) -> Any:
    """Return the type with a `kind` at each object type of a union that has several; the same type if there is none."""
    bare = _resolve_alias(annotation)
    if get_origin(bare) is Annotated:
        inner = bare.__origin__
        if _has_discriminator(bare) or (wanted := with_kinds(inner)) is inner:
            return annotation
        return Annotated[(wanted, *bare.__metadata__)]
    if is_union(bare) and len(dict.fromkeys(each.cls for each in _objects_in(bare))) > 1:
        return _mark_kinds(bare, _Kinds.of(tuple(_objects_in(bare))))
    if is_union(bare) or _is_container(bare):
        arguments = get_args(bare)
        wanted = tuple(map(with_kinds, arguments))
        if any(a is not b for a, b in zip(wanted, arguments, strict=True)):
            return _rebuilt(bare, wanted)
    return annotation


@dataclass(frozen=True, slots=True)
class _ObjectType:
    """An object type in a union: its class, and its annotation."""

    cls: Any
    annotation: Any


def _objects_in(annotation: Any) -> Iterator[_ObjectType]:
    """Yield the object types that are members of a union, or items of its members."""
    bare = _resolve_alias(annotation)
    if get_origin(bare) is Annotated and _has_discriminator(bare):
        return
    if (cls := _object_class(bare)) is not None:
        yield _ObjectType(cls, annotation)
    elif get_origin(bare) is Annotated:
        yield from _objects_in(bare.__origin__)
    elif is_union(bare) or _is_container(bare):
        for each in get_args(bare):
            yield from _objects_in(each)


def _object_class(annotation: Any) -> Any:
    """Return the model, data class or typed dict that an annotation names; None for all other types."""
    while get_origin(annotation) is Annotated:
        annotation = without_alias(annotation.__origin__)
    cls = get_origin(annotation) or annotation
    if is_typeddict(cls):
        return annotation
    if not isinstance(cls, type):
        return None
    is_model = issubclass(cls, BaseModel) and not issubclass(cls, RootModel)
    return annotation if is_model or dataclasses.is_dataclass(cls) else None


def _resolve_alias(annotation: Any) -> Any:
    """Return the value of an alias, unless the alias contains itself; other annotations unchanged."""
    return annotation if _contains_itself(annotation, ()) else without_alias(annotation)


def _contains_itself(annotation: Any, inside: tuple[Any, ...]) -> bool:
    bare = without_alias(annotation)
    if bare is not annotation:
        if annotation in inside:
            return True
        inside = (*inside, annotation)
    return any(_contains_itself(each, inside) for each in get_args(bare))


def _is_container(annotation: Any) -> bool:
    """Return True for lists, sets, tuples and mappings with types of their items."""
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, (Iterable, Mapping)) and _object_class(annotation) is None


def _has_discriminator(annotation: Any) -> bool:
    return any(
        isinstance(each, Discriminator) or (isinstance(each, FieldInfo) and each.discriminator is not None)
        for each in annotation.__metadata__
    )


def _rebuilt(annotation: Any, arguments: tuple[Any, ...]) -> Any:
    if is_union(annotation):
        return Union[arguments]  # noqa: UP007 - of a tuple made here
    return annotation.copy_with(arguments) if hasattr(annotation, "copy_with") else get_origin(annotation)[arguments]


def _mark_kinds(annotation: Any, kinds: _Kinds) -> Any:
    """Return a part of a union with its object types marked."""
    bare = _resolve_alias(annotation)
    if _object_class(bare) is not None:
        return Annotated[annotation, kinds.among([_ObjectType(_object_class(bare), annotation)])]
    if is_union(bare):
        members = get_args(bare)
        objects = [found for each in members for found in _direct(each)]
        others = [_mark_kinds(each, kinds) for each in members if not list(_direct(each))]
        if not objects:
            return _rebuilt(bare, tuple(others))
        together: Any = Union[tuple(each.annotation for each in objects)]  # noqa: UP007 - as above
        return Union[(Annotated[together, kinds.among(objects)], *others)]
    if _is_container(bare) and list(_objects_in(bare)):
        return _rebuilt(bare, tuple(_mark_kinds(each, kinds) for each in get_args(bare)))
    return annotation


def _direct(annotation: Any) -> Iterator[_ObjectType]:
    bare = _resolve_alias(annotation)
    if (get_origin(bare) is not Annotated or not _has_discriminator(bare)) and _object_class(bare) is not None:
        yield _ObjectType(_object_class(bare), annotation)


class _KindedType:
    """An object type with its kind."""

    def __init__(self, kind: str, object_type: _ObjectType, schema: Mapping[str, Any]) -> None:
        self.kind, self.cls = kind, object_type.cls
        self.is_dict = is_typeddict(get_origin(self.cls) or self.cls)
        self.type = AnswerType(object_type.annotation)
        self.own: tuple[Any, ...] = _literals(schema)  # the values of the type's field `kind`


def _literals(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of a `Literal` field `kind`; nothing for a type without one."""
    field = schema.get("properties", {}).get(KIND, {})
    return (field["const"],) if "const" in field else tuple(field.get("enum", ()))


class _Kinds:
    """The kinds of the object types in one union: reads and writes them, and adds them to the schema."""

    def __init__(self, members: Sequence[_KindedType]) -> None:
        self.members = tuple(members)
        self._own = all(each.own for each in members)
        self._by_name: dict[Any, _KindedType] = (
            {value: each for each in members for value in each.own}
            if self._own
            else {each.kind: each for each in members}
        )

    @classmethod
    def of(cls, objects: Sequence[_ObjectType]) -> _Kinds:
        """Return the kinds of these types. Raises `UnsupportedOutput` if they are not clear."""
        found = {each.cls: each for each in objects}.values()
        members: list[_KindedType] = []
        union = " | ".join(_name_of(each.cls) for each in found)
        fix = f'give them a Literal field, and pydantic its name: Annotated[{union}, Field(discriminator="…")]'
        for each in found:
            schema = _root_schema(each.annotation)
            members.append(_KindedType(_name_of(each.cls), each, schema))
        if all(each.own for each in members):
            values = [value for each in members for value in each.own]
            for value in values:
                if values.count(value) > 1:
                    raise UnsupportedOutput(f"two members of the union have the kind {value!r}", fix)
            return cls(members)
        for member in members:
            if _has_kind(member.cls):
                fact = f"{member.kind} has its own field {KIND!r}, and the union needs that name for its members"
                raise UnsupportedOutput(fact, fix)
        names = [each.kind for each in members]
        for name in names:
            if names.count(name) > 1:
                raise UnsupportedOutput(f"two members of the union have the name {name}", fix)
        return cls(members)

    def among(self, objects: Sequence[_ObjectType]) -> _Kinds:
        """Return the kinds of some of the members, which stand together."""
        wanted = [each.cls for each in objects]
        return _Kinds([each for each in self.members if each.cls in wanted])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_wrap_validator_function(
            self._validate,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(self._write, when_used="json"),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        made = handler(schema)
        members = made["anyOf"] if len(self.members) > 1 else [made]
        shown = [
            self._with_kind(handler.resolve_ref_schema(each) | each, member)
            for each, member in zip(members, self.members, strict=True)
        ]
        return {"anyOf": shown} if len(shown) > 1 else shown[0]

    def _with_kind(self, schema: Mapping[str, Any], member: _KindedType) -> dict[str, Any]:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        properties = dict(schema.get("properties", {}))
        kind = properties.pop(KIND) if self._own else {"const": member.kind, "type": "string"}
        required = [KIND, *(each for each in schema.get("required", ()) if each != KIND)]
        return {**rest, "properties": {KIND: kind, **properties}, "required": required}

    def _validate(self, value: Any, handler: Any, info: Any) -> Any:
        if not isinstance(value, dict):
            if info.mode == "json":
                raise PydanticCustomError("kind", "expected an object with the field 'kind'")
            return handler(value)  # one of the program's own objects
        in_json = info.mode == "json"
        if KIND not in value:
            return self._only_fit(value, in_json)
        name = meant_by(str(value[KIND]), self._by_name)
        if name is None:
            raise PydanticCustomError("kind", "the field 'kind' must be one of: {kinds}", {"kinds": self._names})
        member = self._by_name[name]
        fields = {KIND: name, **{key: each for key, each in value.items() if key != KIND}}
        if not self._own:
            del fields[KIND]
        return self._name_kind(member, _read(member, fields, in_json))

    def _only_fit(self, value: dict[str, Any], in_json: bool) -> Any:
        """Return the value of an object without a kind, if exactly one member takes it whole."""
        found: list[tuple[_KindedType, Any]] = []
        for member in self.members:
            try:
                found.append((member, _read(member, value, in_json, extra="forbid")))
            except ValidationError:
                continue
        if len(found) != 1:
            raise PydanticCustomError(
                "kind", "the field 'kind' is missing, which must be one of: {kinds}", {"kinds": self._names}
            )
        return self._name_kind(*found[0])

    def _name_kind(self, member: _KindedType, value: Any) -> Any:
        """Return the value; a typed dict with its kind, because nothing else says which one it is."""
        return {KIND: member.kind, **value} if member.is_dict and not self._own else value

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._by_name))

    def _write(self, value: Any) -> Any:
        member = self._member_of(value)
        if member is None:
            return to_jsonable_python(value, by_alias=True)
        written = member.type.adapter.dump_python(value, mode="json", by_alias=True, warnings=False)
        return written if self._own else {KIND: member.kind, **written}

    def _member_of(self, value: Any) -> _KindedType | None:
        if isinstance(value, dict):
            return self._by_name.get(value.get(KIND))
        classes = {get_origin(each.cls) or each.cls: each for each in self.members if not each.is_dict}
        return next((classes[base] for base in type(value).__mro__ if base in classes), None)


def _read(member: _KindedType, fields: Mapping[str, Any], in_json: bool, extra: Literal["forbid"] | None = None) -> Any:
    if not in_json:
        return member.type.adapter.validate_python(fields, extra=extra)
    # As JSON again: strict types take dates and the like only from JSON.
    return member.type.read(to_json(fields), extra=extra)[0]


def _root_schema(annotation: Any) -> Mapping[str, Any]:
    schema = TypeAdapter(annotation).json_schema()
    root: Mapping[str, Any] = schema
    while "$ref" in root:
        root = schema["$defs"][root["$ref"].rpartition("/")[2]]
    return root


def _has_kind(cls: Any) -> bool:
    """Return True if the JSON of a type can have a field `kind`."""
    if KIND in _root_schema(cls).get("properties", {}):
        return True
    fields: Mapping[str, Any] = getattr(get_origin(cls) or cls, "__pydantic_fields__", {})
    return any(KIND in getattr(each.validation_alias, "choices", ()) for each in fields.values())


def _name_of(cls: Any) -> str:
    name: str = getattr(cls, "__name__", None) or str(cls)
    return re.sub(r"^.*\.", "", name) if is_class(cls) else name
