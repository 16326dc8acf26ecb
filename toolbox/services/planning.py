"""Reads and checks a service's declaration, and creates a plan for each method.

Not here: the decorators (`declaration`), what a service lists (`declared_sources`), its options (`option_checks`), the
roles of parameters (`parameter_roles`), the plans (`plans`), running them (`driver`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import is_protocol

from ..conversations.views import MessageWindow
from ..errors import Problem
from ..handover import handovers_of
from ..introspection import (
    EMPTY,
    Signature,
    Unresolved,
    arguments_for,
    read_signature,
    substitute,
    type_name,
)
from ..parameters import InjectMark
from ..retrieval import retrieves_of
from ..schemas import NotStrict
from ..security import access_to_member
from ..tools.failures import ToolErrors
from ..tools.marks import toolbox_of
from ..tools.retrievers import BoundRetriever, read_retrievers
from ..tools.single_methods import Home
from ..tools.sources import read_tools
from ..tools.tool_calls import InjectedParameter, Tool
from .call_messages import FunctionMessage, MethodMessages
from .declaration import (
    DURABLE_MARK,
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
)
from .declared_sources import as_sources, provider_problems, providers_of
from .fallback_answers import read_fallback
from .method_marks import MethodMarks
from .option_checks import choice_problems, option_problems, search_problems
from .outputs import Output, read_output
from .parameter_roles import find_memory_id, is_call_options, read_roles, unused_problems
from .plans import Layering, MethodPlan
from .templates import Template, doubled_names, parse
from .toolsets import Toolset, offer_problems


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
    problems += _problems_of_members(cls, names)
    plans: dict[str, MethodPlan] = {}
    read = read_tools if home is None else partial(read_tools, home=home)
    class_tools, class_problems = read(as_sources(options.tools), where)
    problems += class_problems
    class_retrievers, retriever_problems = read_retrievers(as_sources(options.retrievers), f"{where}, retrievers=")
    problems += retriever_problems
    failures, handler_problems = handlers_of(cls, options)
    problems += handler_problems
    around = {**(around or {}), **local_names_of(cls)}
    for name in names:
        reader = _MethodPlanner(cls, name, options, known or {}, around, class_tools, limits, failures, layering, read)
        plan = reader.read(class_retrievers)
        problems += reader.problems
        if plan is not None:
            plans[name] = plan
    return plans, problems


def _problems_of_members(cls: type[Any], names: Sequence[str]) -> Iterator[Problem]:
    """Yield problems with the members of a service as a whole. `names` are the methods to implement."""
    where, of_protocol = cls.__name__, is_protocol(cls)
    if not of_protocol:
        for name in sorted(getattr(cls, "__abstractmethods__", frozenset()) - {*names}):
            fact = "is abstract but not a method, so it cannot be implemented"
            yield Problem(f"{where}.{name}", fact, "implement it in the class")
    bare = [problem for base in cls.__mro__ for problem in bare_decorators(base)]
    yield from bare
    for base in cls.__mro__:
        yield from repeated_messages(base)
    if not names and not bare:
        fact = "has no method to implement; methods with a body are kept"
        fix = "declare one without a body: `async def chat(self, text: str) -> str: ...`"
        if not of_protocol:
            fact, fix = "has no abstract method to implement", f"{fix}, with @abstractmethod"
        yield Problem(where, fact, fix)


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
        self.cls, self.name, self.options, self.limits, self.layering = cls, name, options, limits, layering
        self.known, self.around, self.class_tools, self.failures = known, around, class_tools, failures
        self.read_tools = read_tools
        self.where = f"{cls.__name__}.{name}"
        self.function = inspect.getattr_static(cls, name)
        self.signature = self._read_signature()
        self.parameters = {each.name: each for each in self.signature.parameters[1:]}
        self.marks = MethodMarks(cls, name)
        self.providers = providers_of(cls, options, name)
        self.problems: list[Problem] = []

    def _read_signature(self) -> Signature:
        """Return the method's signature, with the type variables of generic bases replaced."""
        read = read_signature(self.function, self.known, self.around)
        owner = next(base for base in self.cls.__mro__ if self.name in vars(base))
        variables = arguments_for(self.cls, owner)
        parameters = (replace(each, annotation=substitute(each.annotation, variables)) for each in read.parameters)
        return Signature(tuple(parameters), substitute(read.returns, variables))

    def read(self, class_retrievers: tuple[BoundRetriever, ...]) -> MethodPlan | None:
        """Return the plan, also of a method with problems; None if it cannot be called as a method."""
        self._check_parameters()
        if not self._takes_self():
            return None
        output = self._read_output()
        memory_id, faults = find_memory_id(self.where, self.parameters.values())
        self.problems += faults
        system = self._read_system_message()
        user = self._read_user_template()
        roles, faults = read_roles(self.where, self.parameters, system, user)
        handovers = handovers_of(self.function)
        self.problems += faults if handovers else (*faults, *unused_problems(self.where, roles.unused, user))
        toolset = self._read_toolset(output, memory_id)
        self._check_tool_guardrails(toolset)
        names = {**self.known, **self.around}
        fallback, faults = read_fallback(self.cls, self.name, self.parameters, output, names)
        self.problems += faults
        messages = MethodMessages(
            where=self.where,
            system=system,
            user=user,
            user_parameter=roles.user_message,
            values=roles.values,
            history=roles.history,
            contents=roles.contents,
            spoken=tuple(each for each in self.parameters if each == roles.user_message or each in roles.contents),
        )
        window = self.options.chat_memory
        layers = partial(self.layering.of_method, self.marks, self.options, has_providers=bool(self.providers))
        return MethodPlan(
            service=self.cls,
            name=self.name,
            signature=_callable_signature(self.function),
            is_coroutine=inspect.iscoroutinefunction(self.function),
            output=output or read_output(str),
            memory_parameter=memory_id,
            window=MessageWindow() if isinstance(window, Default) else window,
            messages=messages,
            call_options=roles.call_options,
            toolset=toolset,
            providers=self.providers,
            options=self.options,
            call_limits=self.options.call_limits(self.limits),
            access=access_to_member(self.cls, self.name),
            failures=self.failures,
            compensations=self._find_compensations(toolset),
            layers=layers(),
            run_layers=partial(layers, in_run=True),
            annotations={each.name: each.annotation for each in self.parameters.values()},
            run_id_parameter=roles.run_id,
            durable=self.options.durable or getattr(self.function, DURABLE_MARK, False),
            fallback=fallback,
            retrievers=self._read_retrievers(class_retrievers, messages),
            handovers=handovers,
            unused=tuple(each.name for each in roles.unused),
        )

    def _report(self, what: str, fix: str) -> None:
        self.problems.append(Problem(self.where, what, fix))

    # --- parameters and the return type

    def _check_parameters(self) -> None:
        for each in self.parameters.values():
            if isinstance(each.annotation, Unresolved):
                text, reason = each.annotation.text, each.annotation.reason
                self._report(
                    f"the annotation {text!r} of parameter {each.name!r} cannot be resolved: {reason}",
                    "import the name at run time, not under `if TYPE_CHECKING`, or register the class",
                )
            if each.is_variadic:
                self._report(f"*{each.name} is not supported", "declare each parameter by name")

    def _takes_self(self) -> bool:
        own = self.signature.parameters[0] if self.signature.parameters else None
        if own is not None and (own.name == "self" or own.annotation is EMPTY):
            return True
        rest = f", {own.name}: …" if own is not None else ""
        self._report("the first parameter is not `self`", f"declare it `def {self.name}(self{rest})`")
        return False

    def _read_output(self) -> Output | None:
        returns = self.signature.returns
        if returns is EMPTY:
            self._report("has no return annotation", "add one, for example `-> str`")
            return None
        if isinstance(returns, Unresolved):
            self._report(
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
            self._report(f"cannot return {type_name(returns)}: {reason}", getattr(error, "fix", fix))
            return None
        if self.options.strict and output.structure is not None:
            try:
                output.structure.enforced(True)
            except NotStrict as error:
                what = f"{type_name(returns)} has no schema that a server can enforce: {error}"
                self._report(what, "remove strict=True, or return a type whose fields are all known")
        if output.is_stream and inspect.iscoroutinefunction(self.function):
            self._report(
                "is `async def` but returns a stream, which is iterated and not awaited",
                f"declare it `def {self.name}(…)`",
            )
        return output

    # --- messages

    def _read_system_message(self) -> Template | FunctionMessage | None:
        mark: MessageMark | None = getattr(self.function, SYSTEM_MARK, None)
        if mark is None:
            mark = next((vars(base)[SYSTEM_MARK] for base in self.cls.__mro__ if SYSTEM_MARK in vars(base)), None)
        if mark is None:
            return None
        if mark.function is not None:
            return self._read_function_message(mark.function)
        return self._read_template(mark, "@system_message")

    def _read_user_template(self) -> Template | None:
        mark: MessageMark | None = getattr(self.function, USER_MARK, None)
        return self._read_template(mark, "@user_message") if mark is not None else None

    def _read_function_message(self, function: MessageFunction) -> FunctionMessage:
        parameters = read_signature(function, self.known, self.around).parameters
        injected: list[InjectedParameter] = []
        for each in parameters[1:]:
            if any(isinstance(mark, InjectMark) for mark in each.metadata):
                injected.append(InjectedParameter(each.name, each.annotation, each.default is not EMPTY))
            elif each.default is EMPTY:
                self._report(
                    f"parameter {each.name!r} of the system message function has no value",
                    f"annotate it as a bean, `{each.name}: Inject[…]`, or give it a default",
                )
        if not parameters:
            self._report("the system message function has no parameter", "add one for the `InvocationContext`")
        return FunctionMessage(function, tuple(injected))

    def _read_template(self, mark: MessageMark, decorator: str) -> Template | None:
        text = self._read_file(mark.file, decorator) if mark.file is not None else mark.text or ""
        if text is None:
            return None
        if not text.strip():
            source = f"{decorator}(file={mark.file!r})" if mark.file is not None else decorator
            self._report(f"the template of {source} is empty", "write the message, or remove the decorator")
            return None
        template, faults = parse(text)
        for fault in faults:
            self._report(
                f"the template of {decorator} has {fault}", "write {name} for a parameter, and {{ or }} for a brace"
            )
        for name in doubled_names(text, frozenset({*self.parameters, "it"})):
            self._report(f"the template of {decorator} has {{{{{name}}}}}, which is not replaced", f"write {{{name}}}")
        self._check_variables(template, decorator)
        return template

    def _read_file(self, file: str, decorator: str) -> str | None:
        module = sys.modules.get(self.cls.__module__)
        path = Path(getattr(module, "__file__", None) or ".").parent / file
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not UTF-8 text"
            fix = "put a UTF-8 text file with this name next to the module"
            self._report(f"{decorator}(file={file!r}): {reason}", fix)
            return None

    def _check_variables(self, template: Template, decorator: str) -> None:
        call_options = {each.name for each in self.parameters.values() if is_call_options(each)}
        for name in sorted(template.variables & call_options):
            self._report(
                f"the template of {decorator} uses {{{name}}}, which contains the options of the call", "remove it"
            )
        for name in sorted(template.variables - {*self.parameters, "it"}):
            near = ", ".join(f"{{{each}}}" for each in self.parameters) or "none"
            fact, fix = f"the template of {decorator} uses unknown parameter {{{name}}}", f"use one of: {near}"
            if name == "response_schema":  # a variable of Quarkus
                fact += ", which is not needed: the schema of the return type is sent with each request"
                fix = "remove it"
            self._report(fact, fix)

    # --- tools

    def _read_toolset(self, output: Output | None, memory_id: str | None) -> Toolset:
        own = toolbox_of(self.function)
        if own is None:
            tools: Sequence[Tool] = self.class_tools
        else:
            tools, problems = self.read_tools(own, self.where)
            self.problems += problems
        toolset = Toolset.of(tools)
        self.problems += offer_problems(self.where, toolset, output, memory_id, self.options.output_mode)
        if not handovers_of(self.function):  # else when those are known
            names = list(toolset.by_name)
            has_providers = bool(self.providers)
            self.problems += choice_problems(self.where, self.options, names, has_providers=has_providers)
        return toolset

    def _read_retrievers(
        self, of_class: tuple[BoundRetriever, ...], messages: MethodMessages
    ) -> tuple[BoundRetriever, ...]:
        """Return the retrievers of the method: its own, or else those of the class."""
        own, retrievers = retrieves_of(self.function), of_class
        if own is not None:
            retrievers, problems = read_retrievers(own, f"{self.where}, @retrieves")
            self.problems += problems
        if retrievers and messages.continues_history:
            fact = "has retrievers, but no user message for which they could search"
            self._report(fact, "add a `str` parameter, or @retrieves() for none")
        return retrievers

    def _check_tool_guardrails(self, toolset: Toolset) -> None:
        if toolset.tools or self.providers:
            return
        for decorator in ("tool_input_guardrails", "tool_output_guardrails"):
            if self.marks.at_method(decorator):
                fact = f"@{decorator} checks the tools that the method calls, but the method offers no tools"
                self._report(fact, "remove it, or use @input_guardrails or @output_guardrails for the method itself")

    def _find_compensations(self, toolset: Toolset) -> Mapping[str, Tool]:
        own = toolbox_of(self.function)
        sources = as_sources(self.options.tools) if own is None else own
        found, problems = self.layering.compensations_of(self.options, toolset.tools, sources)
        self.problems += problems
        return found


def _callable_signature(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
