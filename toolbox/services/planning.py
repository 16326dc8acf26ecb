"""Reads and checks a service's declaration and what it lists, and creates a plan for each method.

A service lists tools, tool providers, and other services as tools. Not here: the decorators (`declaration`), reading
tools (`tools.sources`), the plans (`plans`), running them (`driver`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from ..bean_references import DEFAULT_SCOPE_MARK, BeanReference, all_named
from ..chat import REASONING, ChatRequestParameters, Message, ToolSpecification, UserMessage
from ..contents import Content
from ..errors import Problem
from ..introspection import (
    EMPTY,
    Parameter,
    Signature,
    Unresolved,
    arguments_for,
    read_signature,
    substitute,
    takes,
    type_name,
    unwrapped,
)
from ..limits import UsageLimits
from ..models.fallback_marks import fallbacks_at
from ..models.routing import router_in
from ..parameters import (
    InjectMark,
    MemoryId,
    MemoryIdMark,
    RunIdMark,
)
from ..security import access_to_member
from ..tools.failures import ToolErrors
from ..tools.marks import toolbox_of
from ..tools.single_methods import Home, class_defining
from ..tools.sources import AiServiceTool, bean_types, classes_of_methods, read_tools
from ..tools.tool_calls import InjectedParameter, Tool
from .declaration import (
    DURABLE_MARK,
    PROVIDERS_MARK,
    SYSTEM_MARK,
    UNSET_LIMITS,
    USER_MARK,
    CallLimits,
    Default,
    MessageFunction,
    MessageMark,
    ServiceOptions,
    bare_decorators,
    handlers_of,
    is_interface,
    local_names_of,
    method_names,
    repeated_messages,
    service_options_of,
)
from .fallback_answers import read_fallback
from .memory import MessageWindow, TokenWindow
from .method_marks import MethodMarks
from .outputs import Output, read_output
from .plans import (
    FunctionMessage,
    Layering,
    MethodPlan,
    Provider,
    Template,
    Toolset,
    doubled_names,
    offer_problems,
    parse,
)


def plan_service(
    cls: type[Any],
    options: ServiceOptions,
    layering: Layering,
    known: Mapping[str, Any] | None = None,
    around: Mapping[str, Any] | None = None,
    limits: CallLimits = UNSET_LIMITS,
    home: Home | None = None,
) -> tuple[dict[str, MethodPlan], list[Problem]]:
    """Return the plans of a service's methods by name, and all problems with its declaration.

    `known` are additional classes for annotations, besides those of the module. `around` are local names of the
    enclosing function. `limits` are the defaults for limits that the service does not set. `layering` chooses what acts
    around the methods. `home` returns the class of the bean that provides a class, for tools that are listed as methods
    of it. Methods with problems have a plan too, so that their tools are checked; nothing may call them.
    """
    if not isinstance(cls, type):
        return {}, [Problem(repr(cls), "is not a class", "pass a Protocol or an ABC")]
    where = cls.__name__
    problems = [*option_problems(where, options), *provider_problems(cls, options), *search_problems(where, options)]
    if not is_interface(cls):
        problems.append(Problem(where, "is neither a Protocol nor an ABC", f"declare it `class {where}(Protocol):`"))
        return {}, problems
    names = method_names(cls)
    for name in sorted(getattr(cls, "__abstractmethods__", frozenset()) - {*names}):
        if not getattr(cls, "_is_protocol", False):
            fact = "is abstract but not a method, so it cannot be implemented"
            problems.append(Problem(f"{where}.{name}", fact, "implement it in the class"))
    bare = [problem for base in cls.__mro__ for problem in bare_decorators(base)]
    problems += bare
    problems += [problem for base in cls.__mro__ for problem in repeated_messages(base)]
    if not names and not bare:
        fact = "has no method to implement; methods with a body are kept"
        fix = "declare one without a body: `async def chat(self, text: str) -> str: ...`"
        if not getattr(cls, "_is_protocol", False):
            fact, fix = "has no abstract method to implement", f"{fix}, with @abstractmethod"
        problems.append(Problem(where, fact, fix))
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if name not in names and fallbacks_at(member):
                fact = "@fallback has no effect: the method is not answered by a model"
                problems.append(Problem(f"{where}.{name}", fact, "name a method without a body"))
    plans: dict[str, MethodPlan] = {}
    read = read_tools if home is None else partial(read_tools, home=home)
    class_tools, class_problems = read(as_sources(options.tools), where)
    problems += class_problems
    failures, handler_problems = handlers_of(cls, options)
    problems += handler_problems
    around = {**(around or {}), **local_names_of(cls)}
    for name in names:
        reader = _MethodPlanner(cls, name, options, known or {}, around, class_tools, limits, failures, layering, read)
        plan = reader.read()
        problems += reader.problems
        if plan is not None:
            plans[name] = plan
    return plans, problems


class _MethodPlanner:
    """Reads one method; collects its mistakes in `problems`."""

    def __init__(
        self,
        cls: type[Any],
        name: str,
        options: ServiceOptions,
        known: Mapping[str, Any],
        around: Mapping[str, Any],
        class_tools: Sequence[Tool],
        limits: CallLimits,
        failures: ToolErrors,
        layering: Layering,
        read_tools: Callable[..., tuple[tuple[Tool, ...], tuple[Problem, ...]]],
    ) -> None:
        self.read_tools = read_tools
        self.cls, self.name, self.options, self.limits, self.layering = cls, name, options, limits, layering
        self.failures = failures
        self.known, self.around = known, around
        self.class_tools = class_tools
        self.function = inspect.getattr_static(cls, name)
        self.signature = self._signature()
        self.parameters = {each.name: each for each in self.signature.parameters[1:]}
        self.unreadable = [each for each in self.parameters.values() if is_unreadable(each)]
        self.where = f"{cls.__name__}.{name}"
        self.problems: list[Problem] = []

    def _signature(self) -> Signature:
        """Return the method's signature, with the type variables of generic bases replaced."""
        read = read_signature(self.function, self.known, self.around)
        owner = next(base for base in self.cls.__mro__ if self.name in vars(base))
        variables = arguments_for(self.cls, owner)
        parameters = (replace(each, annotation=substitute(each.annotation, variables)) for each in read.parameters)
        return Signature(tuple(parameters), substitute(read.returns, variables))

    def problem(self, what: str, fix: str) -> None:
        self.problems.append(Problem(self.where, what, fix))

    def read(self) -> MethodPlan | None:
        for each in self.parameters.values():
            if isinstance(each.annotation, Unresolved):
                text, reason = each.annotation.text, each.annotation.reason
                self.problem(
                    f"the annotation {text!r} of parameter {each.name!r} cannot be resolved: {reason}",
                    "import the name at run time, not under `if TYPE_CHECKING`, or register the class",
                )
            if each.is_variadic:
                self.problem(f"*{each.name} is not supported", "declare each parameter by name")
        own = self.signature.parameters[0] if self.signature.parameters else None
        if own is None or (own.name != "self" and own.annotation is not EMPTY):
            rest = f", {own.name}: …" if own is not None else ""
            self.problem("the first parameter is not `self`", f"declare it `def {self.name}(self{rest})`")
            return None
        marks = MethodMarks(self.cls, self.name)
        output = self._output()
        memory = self._memory()
        system = self._system()
        user = self._user_template()
        roles = self._roles(system, user)
        toolset = self._toolset(output, memory)
        for decorator in ("tool_input_guardrails", "tool_output_guardrails"):
            if marks.at_method(decorator) and not toolset.tools and not providers_of(self.cls, self.options, self.name):
                fact = f"@{decorator} checks the tools that the method calls, but the method offers no tools"
                self.problem(fact, "remove it, or use @input_guardrails or @output_guardrails for the method itself")
        names = {**self.known, **self.around}
        fallback, faults = read_fallback(self.cls, self.name, self.parameters, output, names)
        self.problems += faults
        window, providers = self.options.chat_memory, providers_of(self.cls, self.options, self.name)
        layers = partial(self.layering.of_method, marks, self.options, has_providers=bool(providers))
        return MethodPlan(
            service=self.cls,
            name=self.name,
            signature=_callable_signature(self.function),
            is_coroutine=inspect.iscoroutinefunction(self.function),
            output=output or read_output(str),
            memory_parameter=memory,
            window=MessageWindow() if isinstance(window, Default) else window,
            system=system,
            user=user,
            user_parameter=roles.user,
            values=roles.values,
            history=roles.history,
            contents=roles.contents,
            spoken=tuple(each for each in self.parameters if each == roles.user or each in roles.contents),
            call_options=roles.call_options,
            toolset=toolset,
            providers=providers,
            options=self.options,
            call_limits=self.options.call_limits(self.limits),
            access=access_to_member(self.cls, self.name),
            failures=self.failures,
            compensations=self._compensations(toolset),
            layers=layers(),
            run_layers=partial(layers, in_run=True),
            annotations={each.name: each.annotation for each in self.parameters.values()},
            run_id_parameter=roles.run_id,
            durable=self.options.durable or getattr(self.function, DURABLE_MARK, False),
            fallback=fallback,
        )

    # --- the return type

    def _output(self) -> Output | None:
        returns = self.signature.returns
        if returns is EMPTY:
            self.problem("has no return annotation", "add one, for example `-> str`")
            return None
        if isinstance(returns, Unresolved):
            self.problem(
                f"the return annotation {returns.text!r} cannot be resolved: {returns.reason}",
                "import the name at run time, not under `if TYPE_CHECKING`",
            )
            return None
        try:
            output = read_output(returns)
            _ = output.structure
        except Exception as error:  # pydantic raises many kinds of exceptions for unsupported types
            reason = str(error).split("\n", 1)[0].partition(". Set `")[0].rstrip(".")
            fix = "return str, a pydantic model, a Result[…] or a stream"
            self.problem(f"cannot return {type_name(returns)}: {reason}", getattr(error, "fix", fix))
            return None
        if output.is_stream and inspect.iscoroutinefunction(self.function):
            self.problem(
                "is `async def` but returns a stream, which is iterated and not awaited",
                f"declare it `def {self.name}(…)`",
            )
        return output

    # --- messages

    def _memory(self) -> str | None:
        for each in self.parameters.values():
            if each.annotation is MemoryId:
                self.problem(
                    f"parameter {each.name!r} uses MemoryId without a type", f"write `{each.name}: MemoryId[str]`"
                )
        found = [each.name for each in self.parameters.values() if is_memory_id(each)]
        if len(found) > 1:
            self.problem(f"has {len(found)} MemoryId parameters: {', '.join(found)}", "keep only one")
        return found[0] if found else None

    def _system(self) -> Template | FunctionMessage | None:
        mark: MessageMark | None = getattr(self.function, SYSTEM_MARK, None)
        if mark is None:
            mark = next((vars(base)[SYSTEM_MARK] for base in self.cls.__mro__ if SYSTEM_MARK in vars(base)), None)
        if mark is None:
            return None
        if mark.function is not None:
            return self._function_message(mark.function)
        return self._template(mark, "@system_message")

    def _user_template(self) -> Template | None:
        mark: MessageMark | None = getattr(self.function, USER_MARK, None)
        return self._template(mark, "@user_message") if mark is not None else None

    def _function_message(self, function: MessageFunction) -> FunctionMessage:
        parameters = read_signature(function, self.known, self.around).parameters
        injected: list[InjectedParameter] = []
        for each in parameters[1:]:
            if any(isinstance(mark, InjectMark) for mark in each.metadata):
                injected.append(InjectedParameter(each.name, each.annotation, each.default is not EMPTY))
            elif each.default is EMPTY:
                self.problem(
                    f"parameter {each.name!r} of the system message function has no value",
                    f"annotate it as a bean, `{each.name}: Inject[…]`, or give it a default",
                )
        if not parameters:
            self.problem("the system message function has no parameter", "add one for the `InvocationContext`")
        return FunctionMessage(function, tuple(injected))

    def _template(self, mark: MessageMark, decorator: str) -> Template | None:
        text = mark.text
        if mark.file is not None:
            module = sys.modules.get(self.cls.__module__)
            path = Path(getattr(module, "__file__", None) or ".").parent / mark.file
            try:
                text = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "is not UTF-8 text"
                self.problem(
                    f"{decorator}(file={mark.file!r}): {reason}",
                    "put a UTF-8 text file with this name next to the module",
                )
                return None
        if not (text or "").strip():
            source = f"{decorator}(file={mark.file!r})" if mark.file is not None else decorator
            self.problem(f"the template of {source} is empty", "write the message, or remove the decorator")
            return None
        template, faults = parse(text or "")
        for fault in faults:
            self.problem(
                f"the template of {decorator} has {fault}", "write {name} for a parameter, and {{ or }} for a brace"
            )
        known = frozenset(self.parameters) | {"it"}
        for name in doubled_names(text or "", known):
            self.problem(f"the template of {decorator} has {{{{{name}}}}}, which is not replaced", f"write {{{name}}}")
        for name in sorted(
            template.variables & {each.name for each in self.parameters.values() if is_call_options(each)}
        ):
            self.problem(
                f"the template of {decorator} uses {{{name}}}, which contains the options of the call", "remove it"
            )
        for name in sorted(template.variables - known):
            near = ", ".join(f"{{{each}}}" for each in self.parameters) or "none"
            fact, fix = f"the template of {decorator} uses unknown parameter {{{name}}}", f"use one of: {near}"
            if name == "response_schema":  # a variable of Quarkus
                fact += ", which is not needed: the schema of the return type is sent with each request"
                fix = "remove it"
            self.problem(fact, fix)
        return template

    # --- the roles of parameters

    def _roles(self, system: Template | FunctionMessage | None, user: Template | None) -> _Roles:
        readable = [each for each in self.parameters.values() if not is_unreadable(each)]
        call_options = [each.name for each in readable if is_call_options(each)]
        if len(call_options) > 1:
            fact = f"has {len(call_options)} ChatRequestParameters parameters: {', '.join(call_options)}"
            self.problem(fact, "keep only one")
        run_ids = [each.name for each in readable if is_run_id(each)]
        if len(run_ids) > 1:
            self.problem(f"has {len(run_ids)} RunId parameters: {', '.join(run_ids)}", "keep only one")
        rest = [each for each in readable if not (is_memory_id(each) or is_call_options(each) or each.name in run_ids)]
        in_system = system.variables if isinstance(system, Template) else frozenset()
        used = in_system | (user.variables if user is not None else frozenset())
        values = {name: name for name in used if name in self.parameters}
        if "it" in used and "it" not in self.parameters:
            if len(rest) == 1:
                values["it"] = rest[0].name
            elif not self.unreadable:
                self.problem(
                    "uses {it}, which needs exactly one parameter besides the memory id", "use the parameter's name"
                )
        taken = set(values.values())
        history = tuple(each.name for each in rest if each.name not in taken and is_history(each))
        contents = tuple(each.name for each in rest if each.name not in taken and is_content(each))
        left = [each for each in rest if each.name not in taken | set(history) | set(contents)]
        speaker = None
        if user is None:
            speaker, left = self._speaker(left, contents, history)
        misspelt = used - set(self.parameters) - {"it"}
        for each in left if not misspelt else ():  # report a misspelled variable only once
            if each.annotation is EMPTY and user is None:
                self.problem(
                    f"parameter {each.name!r} has no type annotation", f"add one, for example `{each.name}: str`"
                )
                continue
            self.problem(
                f"parameter {each.name!r} is not used in any message",
                f"use {{{each.name}}} in @user_message or @system_message, or remove it",
            )
        return _Roles(
            speaker,
            values,
            history,
            contents,
            call_options[0] if call_options else None,
            run_ids[0] if run_ids else None,
        )

    def _speaker(
        self, left: list[Parameter], contents: tuple[str, ...], history: tuple[str, ...]
    ) -> tuple[str | None, list[Parameter]]:
        """Return the parameter that is the user message, and the unused parameters. A history may be sent alone."""
        able = [each for each in left if may_speak(each)]
        if len(able) == 1:
            return able[0].name, [each for each in left if each is not able[0]]
        if able or left or contents or self.unreadable:
            return None, left
        if not history:
            self.problem("has no user message", 'add a `str` parameter, or @user_message("…")')
        elif any(is_memory_id(each) for each in self.parameters.values()):
            self.problem(
                f"{history[-1]!r} is the only message and the method has a memory id: both are the conversation so far",
                "remove the MemoryId parameter, or add a `str` parameter for a new message",
            )
        return None, left

    # --- tools

    def _toolset(self, output: Output | None, memory: str | None) -> Toolset:
        own = toolbox_of(self.function)
        if own is None:
            tools: Sequence[Tool] = self.class_tools
        else:
            tools, problems = self.read_tools(own, self.where)
            self.problems += problems
        toolset = Toolset.of(tools)
        self.problems += offer_problems(self.where, toolset, output, memory, self.options.output_mode)
        choice = self.options.tool_choice
        names = [tool.specification.name for tool in toolset.tools]
        if choice is None or choice in {*names, "auto", "none"} or providers_of(self.cls, self.options, self.name):
            return toolset
        if self.options.parameters.get("tools") and choice in ("required", "any"):
            return toolset  # for tools of the server
        if not names:
            self.problem(
                f"invalid tool_choice={choice!r}: the method offers no tools",
                "list tools in tools= or @toolbox(…), or remove tool_choice",
            )
        elif choice not in ("required", "any"):
            offered = ", ".join(repr(name) for name in names)
            self.problem(
                f"invalid tool_choice={choice!r}: no tool of this name is offered",
                f'use one of: {offered}, "required", "auto", "none"',
            )
        return toolset

    def _compensations(self, toolset: Toolset) -> Mapping[str, Tool]:
        own = toolbox_of(self.function)
        sources = as_sources(self.options.tools) if own is None else own
        found, problems = self.layering.compensations_of(self.options, toolset.tools, sources)
        self.problems += problems
        return found


@dataclass(frozen=True, slots=True)
class _Roles:
    user: str | None
    values: Mapping[str, str]
    history: tuple[str, ...]
    contents: tuple[str, ...]
    call_options: str | None
    run_id: str | None


def _callable_signature(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


# --- roles of parameters: memory id, history, contents, user message


def is_unreadable(parameter: Parameter) -> bool:
    """Return True if the parameter's role is unknown, because its annotation cannot be resolved."""
    return parameter.is_variadic or isinstance(parameter.annotation, Unresolved)


def is_memory_id(parameter: Parameter) -> bool:
    """Return True for the memory id."""
    return parameter.annotation is MemoryId or any(isinstance(mark, MemoryIdMark) for mark in parameter.metadata)


def _members(annotation: Any) -> set[Any]:
    """Return the types of a union or of a sequence's items, or the type itself."""
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        annotation = get_args(annotation)[0]
        origin = get_origin(annotation)
    return set(get_args(annotation)) if origin in (Union, UnionType) else {annotation}


def is_run_id(parameter: Parameter) -> bool:
    """Return True for the id of the run."""
    return any(isinstance(mark, RunIdMark) for mark in parameter.metadata)


def is_call_options(parameter: Parameter) -> bool:
    """Return True for the options of one call."""
    return unwrapped(parameter.annotation).type is ChatRequestParameters


def is_history(parameter: Parameter) -> bool:
    """Return True for a sequence of messages, which is sent before the user message."""
    annotation = unwrapped(parameter.annotation).type
    origin = get_origin(annotation)
    if not (isinstance(origin, type) and issubclass(origin, Sequence)):
        return False
    return _members(get_args(annotation)[0]) <= set(get_args(Message))


def is_content(parameter: Parameter) -> bool:
    """Return True for contents, which are appended to the user message."""
    return _members(unwrapped(parameter.annotation).type) <= set(get_args(Content))


def may_speak(parameter: Parameter) -> bool:
    """Return True if the parameter can be the user message."""
    annotation = unwrapped(parameter.annotation).type
    if isinstance(annotation, type) and issubclass(annotation, (str, UserMessage)):
        return True
    members = _members(annotation)
    return annotation is Any or members <= {str, UserMessage, *get_args(Content)} or str in members


# --- options

_LEAST = {"max_tool_rounds": 0, "max_tool_calls_per_response": 0, "max_output_retries": 0, "max_result_chars": 1}
_HANDLERS = ("on_unknown_tool", "on_tool_arguments_error", "on_tool_execution_error")


def option_problems(where: str, options: ServiceOptions) -> Iterator[Problem]:
    """Yield a problem for each invalid option."""
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if isinstance(value, Default):
            continue
        if value is None and name in ("max_tool_calls_per_response", "max_result_chars"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield Problem(where, f"invalid {name}={value!r}", f"use {least} or more")
    timeout = options.timeout
    open_ended = timeout is None or isinstance(timeout, Default)
    if not open_ended and not (isinstance(timeout, (int, float)) and timeout is not True and timeout > 0):
        yield Problem(where, f"invalid timeout={timeout!r}", "use a number of seconds greater than 0, or None")
    if options.output_mode not in (None, "schema", "tool", "prompt"):
        yield Problem(where, f"invalid output_mode={options.output_mode!r}", 'use "schema", "tool", "prompt" or None')
    if options.reasoning not in (None, *REASONING):
        fix = f"use one of: {', '.join(REASONING)}; or None"
        yield Problem(where, f"invalid reasoning={options.reasoning!r}", fix)
    if options.on_suspended not in ("raise", "cancel"):
        yield Problem(where, f"invalid on_suspended={options.on_suspended!r}", 'use "raise" or "cancel"')
    if options.on_unknown_outcome not in ("tell", "ask", "retry"):
        fact = f"invalid on_unknown_outcome={options.on_unknown_outcome!r}"
        yield Problem(where, fact, 'use "tell", "ask" or "retry"')
    if not isinstance(options.durable, bool):
        yield Problem(where, f"invalid durable={options.durable!r}", "use True or False")
    for name in ("compensate_on_tool_errors", "compensate_on_failure"):
        if not isinstance(getattr(options, name), bool):
            yield Problem(where, f"invalid {name}={getattr(options, name)!r}", "use True or False")
    if not isinstance(options.concurrent_tools, (bool, Executor)):
        yield Problem(where, f"invalid concurrent_tools={options.concurrent_tools!r}", "use True, False or an Executor")
    if options.model is not None and not isinstance(options.model, str) and router_in(options.model) is None:
        fix = "use the name of a model, and pass the model to the container: Container(models={name: …})"
        yield Problem(where, f"invalid model={options.model!r}", fix)
    window = options.chat_memory
    if window is not None and not isinstance(window, Default) and not callable(getattr(window, "newest", None)):
        yield Problem(where, f"invalid chat_memory={window!r}", "use MessageWindow(…), TokenWindow(…) or None")
    elif isinstance(window, (MessageWindow, TokenWindow)) and not (isinstance(window.limit, int) and window.limit > 0):
        yield Problem(where, f"chat_memory: invalid {type(window).__name__}.limit={window.limit!r}", "use 1 or more")
    if options.limits is not None and not isinstance(options.limits, UsageLimits):
        yield Problem(where, f"invalid limits={options.limits!r}", "use UsageLimits(…) or None")
    if not isinstance(options.parameters, Mapping):
        yield Problem(
            where, f"invalid parameters={options.parameters!r}", "use a mapping, with the names of the server's API"
        )
    for name in _HANDLERS:
        handler = getattr(options, name)
        if handler is not None and not takes(handler, 2):
            yield Problem(
                where, f"invalid {name}={handler!r}", "use a function that takes the error and the InvocationContext"
            )


# --- tools, tool providers and services that a service lists


def service_cycles(cls: type[Any], offered_by: Callable[[type[Any]], Iterable[type[Any]]]) -> Iterator[Problem]:
    """Yield a problem for each cycle of services that are tools of each other and in which `cls` is the first by name.

    For each service that lists `cls`, only the shortest cycle is reported: there may be very many cycles. `offered_by`
    is `services_offered_by`; the checks of all services share its results.
    """
    paths: dict[type[Any], tuple[type[Any], ...]] = {cls: (cls,)}
    queue, name = deque([cls]), _name_of(cls)
    while queue:
        here = queue.popleft()
        for following in offered_by(here):
            if following is cls:
                circle = " -> ".join(each.__name__ for each in (*paths[here], cls))
                fix = "remove one of them from the tools= of another"
                yield Problem(cls.__name__, f"these services are tools of each other: {circle}", fix)
            elif following not in paths and _name_of(following) > name:
                paths[following] = (*paths[here], following)
                queue.append(following)


def _name_of(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{id(cls)}"


def services_offered_by(cls: type[Any]) -> Iterable[type[Any]]:
    """Return the services that a service lists as tools."""
    sources = sources_of(cls)
    listed = (*bean_types(sources), *classes_of_methods(sources))
    return dict.fromkeys(each for each in listed if service_options_of(each) is not None)


def sources_of(cls: type[Any], options: ServiceOptions | None = None) -> tuple[Any, ...]:
    """Return everything that a service's options and methods list as tools."""
    options = options or service_options_of(cls) or ServiceOptions()
    listed = [*as_sources(options.tools)]
    for name in method_names(cls):
        listed += toolbox_of(getattr(cls, name)) or ()
    return tuple(listed)


def providers_of(cls: type[Any], options: ServiceOptions, method: str | None = None) -> tuple[Provider, ...]:
    """Return the tool providers of one method, or of all methods."""
    methods = method_names(cls) if method is None else [method]
    marked = [each for target in (cls, *(getattr(cls, name) for name in methods)) for each in _providers_at(target)]
    given = [*as_sources(options.tool_provider), *dict.fromkeys(marked)]
    return tuple(Provider(bean=each) if is_bean_type(each) else Provider(each) for each in given)


def _providers_at(target: Any) -> tuple[type[Any], ...]:
    marked: tuple[type[Any], ...] = vars(target).get(PROVIDERS_MARK, ())
    return marked


def is_bean_type(listed: object) -> bool:
    """Return True for a type to look up, also `Annotated` with a name."""
    return isinstance(listed, type) or get_origin(listed) is Annotated


def provider_problems(cls: type[Any], options: ServiceOptions) -> Iterator[Problem]:
    """Yield problems with the tool providers."""
    where = cls.__name__
    for each in providers_of(cls, options):
        named = each.bean.__origin__ if get_origin(each.bean) is Annotated else each.bean
        provide = getattr(named or each.given, "provide_tools", each.given if named is None else None)
        if not takes(provide, 1) and not (named is not None and takes(provide, 2)):
            name = getattr(named, "__name__", None) or repr(each.given)
            yield Problem(where, f"{name} is not a tool provider", "add a method `provide_tools(self, request)`")


def named_beans(listed: Iterable[Any]) -> Iterator[type[Any]]:
    """Yield the classes that decorators name at services, tools and their members: beans to register."""
    for each in listed:
        if isinstance(each, Mapping):
            yield from named_beans(each.values())
            continue
        for target in _definitions_in(each):
            for reference in all_named(target):
                named = reference.type
                # An interface is bound to a bean. A class of a wrong kind is reported as such.
                if reference.bean is not None and hasattr(named, DEFAULT_SCOPE_MARK) and not inspect.isabstract(named):
                    yield named


def registrable(listed: Iterable[Any]) -> Iterator[type[Any]]:
    """Yield the listed classes to register as beans: all except interfaces, which are bound to a bean."""
    for cls in listed:
        if not isinstance(cls, type):
            continue
        if not is_interface(cls) or any(name.startswith("__toolbox_") for name in vars(cls)):
            yield cls


def _definitions_in(listed: Any) -> tuple[Any, ...]:
    """Return the functions and classes with the marks of something that can be listed as a tool."""
    target = get_args(listed)[0] if get_origin(listed) is Annotated else listed
    if isinstance(target, AiServiceTool):
        target = target.executor
    if isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type):
        return (target,)
    if inspect.ismethod(target):
        return target, type(target.__self__)
    if inspect.isroutine(target):
        cls = class_defining(target)
        return (target,) if cls is None else (cls,)
    return target, type(target)


def strategies(options: ServiceOptions) -> Iterator[type[Any]]:
    """Yield the classes of the tool search and of the router of models: beans to register."""
    for named in (options.tool_search, options.model):
        bean = BeanReference.to(named).bean
        if isinstance(bean, type) and not inspect.isabstract(bean):
            yield bean


def search_problems(where: str, options: ServiceOptions) -> Iterator[Problem]:
    """Yield problems with the strategy of the tool search."""
    strategy = options.tool_search
    if strategy is None:
        return
    named = BeanReference.to(strategy)
    if not takes(
        getattr(strategy if named.bean is None else named.type, "search", None), 1 if named.bean is None else 2
    ):
        name = getattr(strategy, "__name__", None) or repr(strategy)
        fix = "use KeywordToolSearch(), Bm25ToolSearch(), or a class or instance of ToolSearchStrategy"
        yield Problem(where, f"invalid tool_search={name}: it is not a ToolSearchStrategy", fix)
    elif named.bean is None and not isinstance(getattr(strategy, "specification", None), ToolSpecification):
        fix = "set `specification` to the ToolSpecification of the search tool"
        yield Problem(where, f"the tool_search {type(strategy).__name__} has no specification", fix)


def as_sources(given: Any) -> tuple[Any, ...]:
    """Return tools or providers as a tuple: one, several, or none."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple, set, frozenset)):
        return tuple(given)
    return (given,)
