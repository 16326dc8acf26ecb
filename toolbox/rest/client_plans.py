"""Plans of a REST client as plain data, and reading annotations and signatures into them. A call only reads plans.

Collaborators are the functions and beans that take part in a call: headers, authentication, filters, exception mappers;
each is the class of a callable bean, or a function whose additional parameters are injected. Not here: building
requests from plans (`outgoing`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from types import FunctionType
from typing import Any, get_args

from pydantic import BaseModel, PydanticUserError, TypeAdapter
from typing_extensions import is_protocol

from ..context import InvocationContext
from ..di.injection_points import MISSING, InjectionPoint, point_of, points_of
from ..environment_variables import variables_missing, variables_of
from ..errors import Problem
from ..introspection import (
    EMPTY,
    Parameter,
    Signature,
    Unresolved,
    arguments_for,
    class_of,
    has_body,
    is_union,
    plain,
    read_signature,
    substitute,
    unwrapped,
)
from ..oauth.grants import Grant
from ..parameters import INJECT
from .annotations import (
    MAPPER_MARK,
    ClientMark,
    Collaborator,
    FixedValue,
    MapperMark,
    Place,
    PlaceMark,
    RequestMark,
    fixed_values_of,
    join_paths,
    request_mark_of,
)
from .encoding import (
    PROTECTED_HEADERS,
    EncodingError,
    encode_cookie_value,
    encode_header_value,
    has_dot_segment,
    is_header_name,
    percent_encode,
    text_of,
    texts_of,
)
from .replies import ReplyPlan, ReplyStream, UnreadableReplyError, read_reply

BODILESS = frozenset({"GET", "HEAD", "DELETE"})
_TEMPLATE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter of a method: the place and name its value is sent under.

    With `spread`, each field of the value is sent. `adapter` writes a body, or a field of it, as JSON. With
    `omits_none`, None is not sent as a field of the body.
    """

    name: str
    place: Place
    wire_name: str
    spread: bool = False
    mark: PlaceMark | None = None
    adapter: TypeAdapter[Any] | None = None
    omits_none: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """All that a call of one method needs.

    `path` alternates between literal text (even indexes) and names of path parameters (odd indexes). Computed fixed
    values are `CollaboratorPlan`s. `mappers` are called in order for a failure, those with a status only for it.
    """

    where: str
    verb: str
    path: tuple[str, ...]
    parameters: tuple[ParameterPlan, ...]
    reply: ReplyPlan
    fixed: tuple[FixedValue, ...] = ()
    mappers: tuple[tuple[int | None, CollaboratorPlan], ...] = ()
    timeout: float | None = None
    idempotent: bool = False

    @property
    def template(self) -> str:
        """Return the path template."""
        return "".join(f"{{{part}}}" if at % 2 else part for at, part in enumerate(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestMethodPlan:
    """One method: its function, its signature and the plan of its request."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    is_async: bool
    request: RequestPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """A client class: its methods and their shared collaborators. `auth` may also be an `httpx2.Auth`."""

    methods: tuple[RestMethodPlan, ...] = ()
    headers: CollaboratorPlan | None = None
    auth: Any = None
    request_filters: tuple[CollaboratorPlan, ...] = ()
    response_filters: tuple[CollaboratorPlan, ...] = ()

    def collaborators(self) -> Iterator[CollaboratorPlan]:
        """Yield all collaborators of the class and its methods; one that is used twice appears twice."""
        yield from (each for each in (self.headers, self.auth) if isinstance(each, CollaboratorPlan))
        yield from (*self.request_filters, *self.response_filters)
        for method in self.methods:
            yield from (each.value for each in method.request.fixed if isinstance(each.value, CollaboratorPlan))
            yield from (mapper for _, mapper in method.request.mappers)


def path_parts(template: str) -> tuple[str, ...]:
    """Split a path template as `RequestPlan.path` describes."""
    return tuple(_TEMPLATE.split(template))


# --- collaborators


@dataclass(frozen=True, slots=True, kw_only=True)
class CollaboratorPlan:
    """A collaborator to call: `target`, or the bean of `point`. `points` are the injected parameters."""

    label: str
    target: Any = None
    point: InjectionPoint | None = None
    points: tuple[InjectionPoint, ...] = ()

    @property
    def is_awaited(self) -> bool:
        """Return True if calling it returns a coroutine."""
        called = self.target if self.point is None else getattr(self.point.wants, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(called)

    def all_points(self) -> Iterator[InjectionPoint]:
        """Yield the injection points of all beans that it needs."""
        yield from self.points if self.point is None else (self.point,)


def read_collaborator(
    collaborator: Collaborator, where: str, given: int, names: Mapping[str, Any] | None = None
) -> CollaboratorPlan:
    """Return the plan of a collaborator that is called with `given` positional arguments."""
    label = getattr(collaborator, "__name__", type(collaborator).__name__)
    if isinstance(collaborator, type):
        return CollaboratorPlan(label=label, point=point_of(collaborator, f"{where}: {label}"))
    if not (inspect.isfunction(collaborator) or inspect.ismethod(collaborator)):
        return CollaboratorPlan(label=label, target=collaborator)
    points = points_of(collaborator, f"{where}: {label}", names)[given:]
    return CollaboratorPlan(label=label, target=collaborator, points=points)


def collaborator_problems(plan: CollaboratorPlan, where: str, may_await: bool) -> Iterator[Problem]:
    """Yield the problems of a collaborator that do not depend on the bean graph."""
    if not may_await and plan.is_awaited:
        yield Problem(
            where,
            f"{plan.label} must be awaited, but the method is a `def`",
            "make the method `async def`, or the function a `def`",
        )


def is_context(point: InjectionPoint) -> bool:
    """Return True if the parameter gets the current `InvocationContext`."""
    return point.wants is InvocationContext


def is_required(point: InjectionPoint) -> bool:
    """Return True if a missing bean is an error."""
    return not point.optional and point.default is MISSING


def default_of(point: InjectionPoint) -> object:
    """Return the value of an injection point whose bean is missing."""
    return None if point.default is MISSING else point.default


_PLACE_MARKS: tuple[type[PlaceMark], ...] = get_args(PlaceMark)
_OF_THE_BODY = frozenset({Place.BODY, Place.BODY_FIELD, Place.FORM, Place.FILE})


def read_client(cls: type[object], mark: ClientMark) -> tuple[ClientPlan, tuple[Problem, ...]]:
    """Return the plan of a class and all its problems."""
    where, names = cls.__name__, mark.names
    shared = ClientPlan(
        headers=None if mark.headers is None else read_collaborator(mark.headers, where, 0, names),
        auth=read_auth(mark.auth, where),
        request_filters=tuple(read_collaborator(each, where, 1, names) for each in mark.request_filters),
        response_filters=tuple(read_collaborator(each, where, 1, names) for each in mark.response_filters),
    )
    mappers = (*_find_mappers(cls), *((None, mapper) for mapper in mark.exception_mappers))
    mapping = tuple((status, read_collaborator(each, where, 1, names)) for status, each in mappers)
    plans: list[RestMethodPlan] = []
    problems: list[Problem] = []
    if not mark.config_key.strip():
        problems.append(Problem(where, f"invalid config_key={mark.config_key!r}", "use a name, or leave it out"))
    for owner, name, member in _find_members(cls):
        place = f"{where}.{name}"
        request = request_mark_of(member) or request_mark_of(_function_of(member))
        if request is None:
            problems.extend(_problems_without_verb(owner, place, member))
        elif not isinstance(member, FunctionType):
            problems.append(Problem(place, "only instance methods can send requests", "make it a plain method"))
        else:
            reading = _RequestReader(
                cls=cls,
                owner=owner,
                name=name,
                where=place,
                function=member,
                mark=request,
                client=mark,
                mappers=mapping,
                shared=shared,
            )
            plan = reading.read_method()
            problems.extend(reading.problems)
            plans.extend([plan] if plan is not None else [])
    return replace(shared, methods=tuple(plans)), tuple(problems)


def read_auth(auth: Any, where: str) -> Any:
    """Return an `httpx2.Auth` or a grant unchanged, or the plan of the collaborator that returns an `httpx2.Auth`."""
    if auth is None or isinstance(auth, Grant) or (hasattr(auth, "auth_flow") and not isinstance(auth, type)):
        return auth
    return read_collaborator(auth, where, 0)


def _find_members(cls: type[object]) -> Iterator[tuple[type[object], str, object]]:
    """Yield class, name and object of each member in MRO order; overridden members are omitted."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        if owner is object or owner.__module__ in ("typing", "typing_extensions", "abc"):
            continue
        for name, member in vars(owner).items():
            if name not in seen:
                seen.add(name)
                yield owner, name, member


def _function_of(member: object) -> object:
    """Return the function inside a static method, class method or property: it has the marks."""
    return getattr(member, "__func__", getattr(member, "fget", None))


def _find_mappers(cls: type[object]) -> Iterator[tuple[int | None, Collaborator]]:
    for _, _, member in _find_members(cls):
        function: Any = getattr(member, "__func__", member)
        mark: MapperMark | None = getattr(member, MAPPER_MARK, None) or getattr(function, MAPPER_MARK, None)
        if mark is not None:
            yield mark.status, function


def _problems_without_verb(owner: type[object], where: str, member: object) -> Iterator[Problem]:
    if not isinstance(member, FunctionType):
        return
    if getattr(member, "__isabstractmethod__", False) or (is_protocol(owner) and not has_body(member)):
        yield Problem(where, "missing HTTP verb", "add @rest.get(…) or another verb, or give the method a body")
    elif fixed_values_of(member):
        yield Problem(where, "it has fixed values but no HTTP verb", "add @rest.get(…) or another verb")


@dataclass(kw_only=True)
class _RequestReader:
    """Reads one method and collects its problems."""

    cls: type[object]
    owner: type[object]
    name: str
    where: str
    function: Callable[..., Any]
    mark: RequestMark
    client: ClientMark
    mappers: tuple[tuple[int | None, CollaboratorPlan], ...]
    shared: ClientPlan
    problems: list[Problem] = field(default_factory=list)

    def read_method(self) -> RestMethodPlan | None:
        if self.mark.again:
            self._report_problem("it has more than one HTTP verb", "keep one")
        if self.mark.timeout is not None and self.mark.timeout <= 0:
            self._report_problem(
                f"invalid timeout of {self.mark.timeout:g} seconds", "use more than 0, or leave it out"
            )
        path = self._read_path()
        signature = self._read_signature()
        parameters = tuple(self._read_parameters(signature.parameters[1:], path[1::2]))
        self._check_names(parameters, path[1::2])
        self._check_whole_address(parameters)
        fixed = tuple(self._read_fixed_values())
        self._check_bodies(parameters, fixed)
        self._check_headers(parameters, fixed)
        is_async = inspect.iscoroutinefunction(self.function)
        reply = self._read_reply(signature.returns, is_async)
        self._check_collaborators(fixed, is_async or (reply is not None and reply.stream is ReplyStream.ASYNC))
        if self.problems or reply is None:
            return None
        request = RequestPlan(
            where=self.where,
            verb=self.mark.verb,
            path=path,
            parameters=parameters,
            reply=reply,
            fixed=fixed,
            mappers=self.mappers,
            timeout=self.mark.timeout,
            idempotent=self.mark.idempotent,
        )
        return RestMethodPlan(
            name=self.name,
            function=self.function,
            signature=inspect.signature(self.function),
            is_async=is_async,
            request=request,
        )

    def _read_signature(self) -> Signature:
        """Return the signature with the type variables of generic base classes replaced."""
        read = read_signature(self.function, self.client.names)
        arguments = arguments_for(self.cls, self.owner)
        if not arguments:
            return read
        parameters = (replace(each, annotation=substitute(each.annotation, arguments)) for each in read.parameters)
        return Signature(tuple(parameters), substitute(read.returns, arguments))

    def _report_problem(self, what: str, fix: str) -> None:
        self.problems.append(Problem(self.where, what, fix))

    def _read_fixed_values(self) -> Iterator[FixedValue]:
        of_classes = (fixed for owner in reversed(self.cls.__mro__) for fixed in fixed_values_of(owner))
        for fixed in (*of_classes, *fixed_values_of(self.function)):
            value = fixed.value
            yield replace(fixed, value=self._read_collaborator(value)) if callable(value) else fixed
            if not callable(value) and not any(variables_of(value)) and (reason := _encoding_problem(fixed)):
                self._report_problem(f"{fixed.place} {fixed.name} cannot be sent: {reason}", "correct its value")
            for name in variables_missing(value) if fixed.required else ():
                self._report_problem(
                    f"{fixed.place} {fixed.name} needs the environment variable {name}, which is not set",
                    f"set {name}, write ${{{name}:default}}, or pass required=False",
                )

    def _read_collaborator(self, function: Collaborator) -> CollaboratorPlan:
        return read_collaborator(function, self.where, 0, self.client.names)

    def _read_path(self) -> tuple[str, ...]:
        path = join_paths(self.client.path, self.mark.path)
        parts = path_parts(path)
        literals = "".join(parts[::2])
        if "{" in literals or "}" in literals:
            self._report_problem(f"the path {path!r} has an unmatched brace", "write {name} for a parameter")
        if "://" in literals:
            fix = "write the part after the host; the base URL comes from the settings or base_url="
            self._report_problem(f"the path {self.mark.path or self.client.path!r} is a whole URL", fix)
        if "?" in literals or "#" in literals:
            self._report_problem(
                f"the path {path!r} has a query", "declare it with @rest.client_query_param(name, value)"
            )
        if has_dot_segment(path):
            self._report_problem(f"the path {path!r} has the segment '.' or '..'", "write the path without it")
        return parts

    def _read_parameters(self, parameters: tuple[Parameter, ...], in_path: tuple[str, ...]) -> Iterator[ParameterPlan]:
        for parameter in parameters:
            if parameter.is_variadic:
                self._report_problem(f"*{parameter.name} cannot be sent", "name each parameter")
            elif parameter.annotation is EMPTY:
                self._report_problem(f"the parameter {parameter.name} has no annotation", "add a type annotation")
            elif isinstance(parameter.annotation, Unresolved):
                self._report_unresolved(f"the annotation of {parameter.name}", parameter.annotation)
            elif not _is_filled_by_library(parameter):
                yield self._read_parameter(parameter, in_path)

    def _report_unresolved(self, what: str, annotation: Unresolved) -> None:
        self._report_problem(
            f"{what}, {annotation.text!r}, cannot be resolved ({annotation.reason})",
            "import the name in the module of the class, or define it there",
        )

    def _read_parameter(self, parameter: Parameter, in_path: tuple[str, ...]) -> ParameterPlan:
        name, annotation = parameter.name, parameter.annotation
        marks = tuple(_find_place_marks(parameter))
        if len(marks) > 1:
            self._report_problem(f"the parameter {name} has more than one place marker", "keep one")
        structured = _is_structured(annotation)
        if marks:
            mark: PlaceMark | None = marks[0]
            place = marks[0].place
        else:
            mark = None
            place = Place.PATH if name in in_path else Place.BODY if structured else Place.QUERY
        spread = structured and place in (Place.QUERY, Place.FORM)
        if spread and not _has_fields(annotation):
            self._report_problem(
                f"{name} cannot be a {place} parameter: it is neither text nor has fields", "use a model"
            )
        one_value = place in (Place.PATH, Place.COOKIE, Place.URL)
        if (structured and (one_value or place is Place.HEADER)) or (one_value and _is_list(annotation)):
            self._report_problem(
                f"the parameter {name} holds more than one value, but a {place} holds one", "use a scalar"
            )
        adapter = self._make_adapter(name, annotation) if place in (Place.BODY, Place.BODY_FIELD) else None
        omits_none = parameter.default is None
        return ParameterPlan(
            name=name,
            place=place,
            wire_name=_choose_wire_name(name, place, mark),
            spread=spread,
            mark=mark,
            adapter=adapter,
            omits_none=omits_none,
        )

    def _make_adapter(self, name: str, annotation: Any) -> TypeAdapter[Any] | None:
        try:
            return TypeAdapter(annotation)
        except PydanticUserError as error:
            reason = str(error).partition("\n")[0]
            self._report_problem(f"pydantic cannot write the body {name} ({reason})", "use a pydantic model")
            return None

    def _check_names(self, parameters: tuple[ParameterPlan, ...], in_path: tuple[str, ...]) -> None:
        names = [parameter.wire_name for parameter in parameters if parameter.place is Place.PATH]
        for name in in_path:
            if name not in names:
                self._report_problem(
                    f"the path contains {{{name}}}, but the method has no such parameter",
                    "add the parameter or correct the path",
                )
        for name in names:
            if name not in in_path:
                self._report_problem(
                    f"the path parameter {name} is missing in the path", f"write {{{name}}} into the path"
                )
            if names.count(name) > 1:
                self._report_problem(f"more than one parameter has the name {{{name}}}", "keep one")

    def _check_whole_address(self, parameters: tuple[ParameterPlan, ...]) -> None:
        names = [parameter.name for parameter in parameters if parameter.place is Place.URL]
        if len(names) > 1:
            self._report_problem(f"{', '.join(names)} are all whole addresses, but a request has one", "keep one")
        elif names and self.mark.path:
            fix = f"write @rest.{self.mark.verb.lower()}() without a path"
            self._report_problem(f"{names[0]} is the whole address, but the verb has the path {self.mark.path!r}", fix)

    def _check_bodies(self, parameters: tuple[ParameterPlan, ...], fixed: tuple[FixedValue, ...]) -> None:
        places = [each.place for each in parameters] + [each.place for each in fixed]
        of_the_body = [place for place in places if place in _OF_THE_BODY]
        bodies = [parameter.name for parameter in parameters if parameter.place is Place.BODY]
        if of_the_body and self.mark.verb in BODILESS:
            names = [parameter.name for parameter in parameters if parameter.place in _OF_THE_BODY] or ["a fixed value"]
            self._report_problem(
                f"{', '.join(names)} would be the body of a {self.mark.verb} request, which cannot have one",
                "use @rest.post, or mark its place: Annotated[…, rest.Query()]",
            )
        elif len(bodies) > 1:
            self._report_problem(
                f"{', '.join(bodies)} are all bodies, but a request has one", "put them into one model"
            )
        elif bodies and len(of_the_body) > 1:
            kind = "fields of a body" if Place.BODY_FIELD in of_the_body else "form fields"
            self._report_problem(f"{bodies[0]} is the body, but the method has {kind} too", "keep one of the two")
        elif len({place is Place.BODY_FIELD for place in of_the_body}) > 1:
            self._report_problem("the method has fields of a JSON body and form fields", "keep one of the two")
        fields = [parameter.wire_name for parameter in parameters if parameter.place is Place.BODY_FIELD]
        for name in dict.fromkeys(each for each in fields if fields.count(each) > 1):
            self._report_problem(f"more than one parameter is the field {name!r} of the body", "keep one")

    def _check_headers(self, parameters: tuple[ParameterPlan, ...], fixed: tuple[FixedValue, ...]) -> None:
        named = [(each.place, each.wire_name) for each in parameters] + [(each.place, each.name) for each in fixed]
        for place, name in named:
            if place not in (Place.HEADER, Place.COOKIE):
                continue
            if not is_header_name(name):
                self._report_problem(f"invalid {place} name {name!r}", "use letters, digits and hyphens")
            elif place is Place.HEADER and name.lower() in PROTECTED_HEADERS:
                self._report_problem(f"the header {name} can only be set by the HTTP library", "remove it")

    def _check_collaborators(self, fixed: tuple[FixedValue, ...], may_await: bool) -> None:
        computing = [each.value for each in fixed if isinstance(each.value, CollaboratorPlan)]
        for each in (*self.shared.collaborators(), *computing, *(mapper for _, mapper in self.mappers)):
            self.problems.extend(collaborator_problems(each, self.where, may_await))

    def _read_reply(self, annotation: Any, is_async: bool) -> ReplyPlan | None:
        if annotation is EMPTY:
            self._report_problem("missing return annotation", "add the return type, or None")
        elif isinstance(annotation, Unresolved):
            self._report_unresolved("the return annotation", annotation)
        else:
            try:
                return read_reply(annotation, self.mark.verb, is_async)
            except UnreadableReplyError as error:
                self._report_problem(error.what, error.fix)
        return None


def _encoding_problem(fixed: FixedValue) -> str | None:
    """Return the reason why a constant cannot be sent in its place; None if it can."""
    try:
        if fixed.place is Place.COOKIE:
            encode_cookie_value(text_of(fixed.value))
        for text in texts_of(fixed.value):
            encode_header_value(text) if fixed.place is Place.HEADER else percent_encode(text)
    except EncodingError as error:
        return str(error)
    return None


def _find_place_marks(parameter: Parameter) -> Iterator[PlaceMark]:
    for mark in parameter.metadata:
        if isinstance(mark, _PLACE_MARKS):
            yield mark
        elif isinstance(mark, type) and issubclass(mark, _PLACE_MARKS):
            yield mark()


def _is_filled_by_library(parameter: Parameter) -> bool:
    """Return True for a parameter that the library injects, such as `InvocationContext`: it is never sent."""
    if any(_find_place_marks(parameter)):
        return False
    return INJECT in parameter.metadata or unwrapped(parameter.annotation).type is InvocationContext


def _choose_wire_name(name: str, place: Place, mark: PlaceMark | None) -> str:
    if mark is not None and mark.name is not None:
        return mark.name
    return name.replace("_", "-") if place is Place.HEADER else name


def _is_structured(annotation: Any) -> bool:
    """Return True if values of the type have fields, are bytes, or contain such values: a URL cannot hold them."""
    annotation = plain(annotation)
    if is_union(annotation):
        return any(_is_structured(each) for each in get_args(annotation))
    kind = class_of(annotation)
    if not isinstance(kind, type):
        return False
    if issubclass(kind, (BaseModel, Mapping, bytes, bytearray)) or is_dataclass(kind):
        return True
    return issubclass(kind, Collection) and any(_is_structured(each) for each in get_args(annotation))


def _is_list(annotation: Any) -> bool:
    """Return True if values of the type are lists, tuples, sets or the like, also with `| None`."""
    annotation = plain(annotation)
    if is_union(annotation):
        return any(_is_list(each) for each in get_args(annotation))
    kind = class_of(annotation)
    return isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, (str, bytes, Mapping))


def _has_fields(annotation: Any) -> bool:
    """Return True if values of the type are models, dataclasses or mappings, also with `| None`."""
    annotation = plain(annotation)
    if is_union(annotation):
        return all(each is type(None) or _has_fields(each) for each in get_args(annotation))
    kind = class_of(annotation)
    return isinstance(kind, type) and (issubclass(kind, (BaseModel, Mapping)) or is_dataclass(kind))
