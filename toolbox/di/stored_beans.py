"""Conversation-scoped classes: how their beans are stored as JSON, and the beans of one conversation while it is open.

Not here: the scope of a conversation (`scopes`), the store that keeps the JSON (`conversations`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_type_hints, overload

from ..errors import Problem, StoredBeanError
from ..introspection import class_of, type_name
from ..json_text import whole_json
from .decorators import Scope, mark_class

if TYPE_CHECKING:
    from pydantic import ValidationError

C = TypeVar("C", bound=type[Any])

_log = logging.getLogger("toolbox")

OnInvalid: TypeAlias = Literal["raise", "reset"]

ON_INVALID_MARK = "__toolbox_on_invalid__"


@overload
def conversation_scoped(cls: C, /) -> C: ...


@overload
def conversation_scoped(*, on_invalid: OnInvalid = "raise") -> Callable[[C], C]: ...


def conversation_scoped(cls: Any = None, /, *, on_invalid: OnInvalid = "raise") -> Any:
    """Create one instance of the class per conversation, and store its fields with the conversation.

        @conversation_scoped
        class Reservation(BaseModel):
            departure: date | None = None

    The class is a pydantic model or a dataclass whose fields have defaults; they are never injected. The bean is stored
    if it changed, in the write that stores the turn. It is not closed: a method `stop` is not called. What no longer
    fits the fields raises `StoredBeanError`; with `on_invalid="reset"` the bean begins with its defaults, and a warning
    is logged. Raises `TypeError` for anything but a class, and for a second scope, `ValueError` for another
    `on_invalid`.
    """
    if on_invalid not in ("raise", "reset"):
        raise ValueError(f'@conversation_scoped: invalid on_invalid={on_invalid!r}; use "raise" or "reset"')

    def apply(cls: C) -> C:
        mark_class(cls, Scope.CONVERSATION)
        setattr(cls, ON_INVALID_MARK, on_invalid)
        return cls

    return apply if cls is None else apply(cls)


# --- one class


class BeanForm:
    """How the beans of a conversation-scoped class are stored: under which name, and as which JSON.

    JSON has the fields by their names in Python, whatever their aliases are.
    """

    def __init__(self, form: Any) -> None:
        self._make: Callable[[], Any] = form
        self._type = form
        self.label = type_name(form)
        self.name = f"{class_of(form).__module__}.{self.label}"
        self.resets = getattr(class_of(form), ON_INVALID_MARK, "raise") == "reset"

    def __call__(self) -> Any:
        """Return a new bean with the defaults of its fields."""
        return self._make()

    @cached_property
    def _adapter(self) -> Any:
        # Imported late, as the rest of pydantic here: a program without such beans does not need it.
        from pydantic import TypeAdapter

        return TypeAdapter(self._type)

    def write(self, bean: Any) -> str:
        """Return the JSON of a bean. Raises `StoredBeanError` if pydantic cannot write a field."""
        fields: dict[str, Any] = {"mode": "json", "by_alias": False, "round_trip": True, "warnings": False}
        try:
            return whole_json(self._adapter.dump_python(bean, **fields))
        except Exception as error:  # serializers of the program can raise any error
            reason = f"its value cannot be written as JSON ({type(error).__name__})"
        for name in self._field_names:
            with suppress(Exception):
                whole_json(self._adapter.dump_python(bean, include={name}, **fields))
                continue
            raise StoredBeanError(self.label, name, reason)
        raise StoredBeanError(self.label, "", reason)

    def read(self, text: str, fact: str = "what is stored is no longer valid") -> Any:
        """Return the bean that `write` wrote. Fields that the class no longer has are ignored.

        Raises `StoredBeanError` with this fact.
        """
        from pydantic import ValidationError

        by_name: dict[str, Any] = {"by_alias": False, "by_name": True}
        try:
            try:
                return self._adapter.validate_json(text, **by_name)
            except ValidationError as error:
                if any(each["type"] != "extra_forbidden" for each in error.errors(include_url=False)):
                    raise
                return self._adapter.validate_json(text, extra="ignore", **by_name)
        except ValidationError as error:
            field, cause = self._first_fault(error)
        except Exception as error:  # validators of the program can raise any error
            field, cause = "", type(error).__name__
        # Outside of the handlers, so that the context of the error does not have the values.
        raise StoredBeanError(self.label, field, f"{fact} ({cause})")

    def _first_fault(self, error: ValidationError) -> tuple[str, str]:
        """Return the field and the kind of the first fault; pydantic's path and message may contain values."""
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = fault["loc"][0] if fault["loc"] else ""
        return str(place) if place in self._field_names else "", fault["type"]

    @property
    def _field_names(self) -> tuple[str, ...]:
        cls = class_of(self._type)
        if dataclasses.is_dataclass(cls):
            return tuple(each.name for each in dataclasses.fields(cls))
        return tuple(getattr(cls, "model_fields", ()))

    # --- checks

    def problems(self) -> Iterator[Problem]:
        """Yield why beans of the class cannot be stored."""
        from pydantic import BaseModel

        cls = class_of(self._type)
        if not (isinstance(cls, type) and (BaseModel in cls.__mro__ or dataclasses.is_dataclass(cls))):
            fact = "a conversation-scoped class must be a pydantic model or a dataclass"
            yield Problem(self.label, fact, "derive it from BaseModel, or add @dataclass")
            return
        try:
            written, read = self._schema("serialization"), self._schema("validation")
        except Exception as error:  # pydantic and the hooks of types raise many kinds of errors
            yield from self._problems_of_types(error)
            return
        required = read.required | {
            name for name, each in getattr(cls, "model_fields", {}).items() if each.is_required()
        }
        is_read = set(read.fields)
        if dataclasses.is_dataclass(cls):
            is_read = {each.name for each in dataclasses.fields(cls) if each.init}
        for name, schema in read.fields.items():
            where = f"{self.label}.{name}"
            if name in required:
                fact = "a field of a conversation-scoped class needs a default: it has no value at first"
                yield Problem(where, fact, f"give it one, such as `{name}: … | None = None`")
            elif name not in written.fields or name not in is_read:
                fact = "the field is not written or not read, so its value would be lost between two calls"
                yield Problem(
                    where, fact, "remove exclude=, init=False or InitVar; use a PrivateAttr for what may be lost"
                )
            elif read.lacks_form(schema) or written.lacks_form(written.fields[name]):
                yield _problem_of_type(where)
            elif written.has_secret(written.fields[name]):
                fact = "pydantic writes a secret without its value, so it would be lost"
                yield Problem(
                    where, fact, "keep secrets outside of conversations, for example in a request-scoped bean"
                )

    def _schema(self, mode: Literal["serialization", "validation"]) -> _FormSchema:
        return _FormSchema(self._adapter.json_schema(mode=mode, by_alias=False, schema_generator=_form_generator()))

    def _problems_of_types(self, error: Exception) -> Iterator[Problem]:
        """Yield the fields whose types pydantic does not know, if that is why it made no schema of the class."""
        from pydantic import TypeAdapter

        found = False
        for name, annotation in _annotations_of(class_of(self._type)).items():
            try:
                TypeAdapter(annotation)
            except Exception:
                found = True
                yield _problem_of_type(f"{self.label}.{name}")
        if not found:
            what = f"pydantic cannot write and read the class ({type(error).__name__})"
            yield Problem(self.label, what, "use types that pydantic knows, with annotations that it can resolve")


def _annotations_of(cls: Any) -> dict[str, Any]:
    try:
        hints = get_type_hints(cls, include_extras=True)
    except Exception:  # an annotation that cannot be resolved is reported for the class
        return {}
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def _problem_of_type(where: str) -> Problem:
    fact = "pydantic cannot write the type of the field as JSON and read it again"
    return Problem(where, fact, "use a type that it can, or a PrivateAttr for what need not be stored")


_NO_FORM = "x-toolbox-no-form"


class _FormSchema:
    """The JSON schema of a class, in which types that have no JSON are marked."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._parts: dict[str, Any] = schema.get("$defs", {})
        top = self._parts[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        self.required: frozenset[str] = frozenset(top.get("required", ()))
        self.fields: dict[str, Any] = top.get("properties", {"root": top})  # a RootModel has none

    def lacks_form(self, schema: Any) -> bool:
        """Return True if a part of the schema has no JSON."""
        return self._find(schema, lambda each: _NO_FORM in each, set())

    def has_secret(self, schema: Any) -> bool:
        """Return True if a part of the schema is a secret of pydantic."""
        return self._find(schema, lambda each: bool(each.get("writeOnly") and each.get("format") == "password"), set())

    def _find(self, schema: Any, is_sought: Callable[[dict[str, Any]], bool], seen: set[str]) -> bool:
        if isinstance(schema, list):
            return any(self._find(each, is_sought, seen) for each in schema)
        if not isinstance(schema, dict):
            return False
        if is_sought(schema):
            return True
        if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            if self._find(self._parts.get(reference.rpartition("/")[2]), is_sought, seen):
                return True
        # Defaults and examples are values, not schemas.
        parts = [each for name, each in schema.items() if name not in ("default", "examples", "const", "enum")]
        return any(self._find(each, is_sought, seen) for each in parts)


def _form_generator() -> type[Any]:
    """Return a generator of JSON schemas that marks what has no JSON, in place of raising an error."""
    from pydantic.json_schema import GenerateJsonSchema

    class FormGenerator(GenerateJsonSchema):
        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic declares it so

        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
            # What a function reads or writes has a form that only the function knows.
            lacks_form = schema["type"] in ("is-instance", "is-subclass", "callable", "generator")
            return {_NO_FORM: error_info} if lacks_form else {}

        def function_before_schema(self, schema: Any) -> dict[str, Any]:
            return _unless_formless(super().function_before_schema(schema))

        def function_wrap_schema(self, schema: Any) -> dict[str, Any]:
            return _unless_formless(super().function_wrap_schema(schema))

    return FormGenerator


def _unless_formless(schema: dict[str, Any]) -> dict[str, Any]:
    # A function before the check of the type may make the instance from JSON.
    return {} if _NO_FORM in schema else schema


# --- the beans of one conversation


@dataclass(slots=True)
class _Made:
    """A bean that is used, and its JSON when it was last loaded or noted."""

    form: BeanForm
    bean: Any
    last: str


class StoredBeans:
    """The conversation-scoped beans of one conversation while it is open: as they were loaded, and as they are now.

    - `loaded`: the JSON values with which the conversation was loaded, by the stored names of their classes.
    - `recorded`: newer ones, which a run has recorded with the results of its tools and not stored yet.

    Beans that nobody uses are not read. Any thread may use it.
    """

    def __init__(self, loaded: Mapping[str, Any] | None = None, recorded: Mapping[str, Any] | None = None) -> None:
        self.loaded: Mapping[str, Any] = MappingProxyType(dict(loaded or {}))
        self._noted: dict[str, Any] = dict(recorded or {})
        self._made: dict[str, _Made] = {}

    def make(self, form: BeanForm) -> Any:
        """Return the bean of a class, read from its JSON, or a new one.

        Raises `StoredBeanError`; what is stored stays as it is.
        """
        bean = self._read(form)
        if bean is None:
            bean = form()
        # Not the JSON that was loaded: a field that the class no longer has does not make it another one.
        self._made[form.name] = _Made(form, bean, form.write(bean))
        return bean

    def _read(self, form: BeanForm) -> Any:
        stored = self._noted.get(form.name, self.loaded.get(form.name))
        if stored is None:
            return None
        try:
            return form.read(whole_json(stored))
        except StoredBeanError as error:
            if not form.resets:
                raise
            where = f"{form.label}.{error.field}" if error.field else form.label
            _log.warning("%s begins with its defaults: %s: %s", form.label, where, error.reason)
            return None

    def changed(self) -> dict[str, Any]:
        """Return the JSON values of the beans that are not as they were loaded, by name: what a turn stores.

        Raises `StoredBeanError` for a bean that could not be read again.
        """
        return {**self._noted, **{name: json.loads(text) for name, text in self._find_changes().items()}}

    def note_changes(self) -> dict[str, Any]:
        """Return what has changed since the last time, for the record of a tool call. It stays in `changed()`."""
        changes = self._find_changes()
        for name, text in changes.items():
            self._made[name].last = text
        noted = {name: json.loads(text) for name, text in changes.items()}
        self._noted.update(noted)
        return noted

    def note_stored(self, written: Mapping[str, Any]) -> None:
        """Take what `changed()` returned as what is loaded: it was stored. What changed since is still a change."""
        self.loaded = MappingProxyType({**self.loaded, **written})
        for name, value in written.items():
            self._noted.pop(name, None)
            if name in self._made:
                self._made[name].last = whole_json(value)

    def take_back(self, written: Mapping[str, Any]) -> None:
        """Take what was noted as stored for a change again: its write failed."""
        self._noted = {**written, **self._noted}

    def _find_changes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, made in [*self._made.items()]:  # other threads may add more
            text = made.form.write(made.bean)
            if text != made.last:
                # A value of another type than that of its field would be refused by every later call.
                made.form.read(text, "its value does not fit its type, so it could not be read again")
                found[name] = text
        return found
