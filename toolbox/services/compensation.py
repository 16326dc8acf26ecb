"""Compensation: undoes the tools of an invocation that succeeded, when another tool or the invocation fails.

Reads and checks the methods marked with `@compensate_for`, and has the layers that call them. The list of tools to undo
comes from the executions in the state. Not here: the decorator (`tools.marks`), the tool loop (`loop`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from ..bean_references import definitions_of
from ..chat import ToolExecution, ToolExecutionRequest, ToolExecutionResultMessage, ToolSpecification
from ..context import Cancellation, current_invocation, in_tool
from ..errors import Problem, ToolArgumentsError
from ..events import CompensatedEvent, Listeners
from ..execution.cancellation import finish_before_cancellation
from ..execution.markers import EXECUTION_MARK, Execution, execution_of, execution_problems
from ..execution.runners import LoopRunner
from ..introspection import admits_none, unwrapped
from ..logs import own_frames
from ..tools.failures import message_of
from ..tools.function_calls import run_tool
from ..tools.marks import compensated_by
from ..tools.results import Encoded
from ..tools.sources import members_of
from ..tools.specification import Role, ToolParameter, read_parameters
from ..tools.tool_calls import Tool, ToolCall, ToolStep, call_options_problems, read_hidden
from ..tools.written_arguments import with_recorded_arguments
from .invocation import Invocation
from .outputs import Compensation
from .recording_needs import FAILURE, PlaceInRun, RecordedFailure
from .state import State, identity_of
from .stored_forms import StoredExecution, fields_from_dict, fields_to_dict

logger = logging.getLogger("toolbox.services")


# --- reading compensations


def compensations_of(tools: Sequence[Tool], sources: Iterable[object] = ()) -> tuple[dict[str, Tool], list[Problem]]:
    """Return the compensation of each tool by the tool's name, and all problems.

    Compensations are methods of the tools' classes, and functions among `sources`.
    """
    problems: list[Problem] = []
    found: dict[str, Tool] = {}
    marked = [*_of_classes(tools), *(_Marked.of_function(each) for each in sources if compensated_by(each) is not None)]
    for each in marked:
        tool = each.compensated(tools)
        if tool is None and each.compensates_sibling:
            continue  # of a class of which other methods are listed
        if tool is None:
            named = each.target if isinstance(each.target, str) else getattr(each.target, "__name__", repr(each.target))
            fact = f"@compensate_for names an unknown tool: {named!r}"
            problems.append(Problem(each.where, fact, "name a tool that the service offers"))
        elif tool.name in found:
            fact = f"the tool {tool.name!r} has two compensations: {found[tool.name].where} and {each.where}"
            problems.append(Problem(each.where, fact, "keep only one"))
        elif (made := each.read(tool, problems)) is not None:
            found[tool.name] = made
    return found, problems


@dataclass(frozen=True, slots=True)
class _Marked:
    """A function or method marked with `@compensate_for`, and the tools of the same class or object."""

    where: str
    function: Any
    raw: Any
    definitions: tuple[Any, ...]
    target: Any
    owner: type[Any] | None = None
    attribute: str = ""
    sibling: Tool | None = None
    """A tool of the same class or object."""

    @classmethod
    def of_function(cls, function: Any) -> _Marked:
        """Return a marked function."""
        return cls(function.__name__, function, function, (function,), compensated_by(function))

    def compensated(self, tools: Sequence[Tool]) -> Tool | None:
        """Return the tool that this compensation undoes."""
        if isinstance(self.target, str):
            return next((tool for tool in tools if tool.name == self.target), None)
        target = _plain(self.target)
        for tool in tools:
            candidates = (*tool.definitions, tool.function)
            if (self.owner is None or tool.owner is self.owner) and any(_plain(each) is target for each in candidates):
                return tool
        return None

    @property
    def compensates_sibling(self) -> bool:
        """True if this compensation undoes a tool of the same class, whether or not a service offers it."""
        siblings = () if self.owner is None else members_of(self.owner)
        if isinstance(self.target, str):
            return any(self.target in (each.mark.name, each.function.__name__) for each in siblings)
        target = _plain(self.target)
        return any(_plain(each) is target for member in siblings for each in member.definitions)

    def read(self, tool: Tool, problems: list[Problem]) -> Tool | None:
        """Return the compensation as something to call, or None if it has problems."""
        count = len(problems)
        bound = self.owner is not None and not isinstance(self.raw, staticmethod)
        names = {**getattr(self.function, "__globals__", {})}
        if self.owner is not None:
            names |= {each.__name__: each for each in reversed(self.owner.__mro__)}
        taken = read_parameters(self.function, self.where, names, problems, bound=bound)
        visible = [each for each in taken.parameters if each.role is Role.MODEL]
        if len(problems) == count and not _fits(visible, tool):
            shown = ", ".join(each.name for each in tool.visible) or "none"
            fact = f'@compensate_for("{tool.name}") has other parameters than the tool'
            fix = f"take one ToolExecution, or the same parameter types as the tool ({shown})"
            problems.append(Problem(self.where, fact, fix))
        problems += call_options_problems(taken.parameters, self.where)
        execution = self._execution(tool)
        problems += execution_problems(self.where, self.function, execution)
        if len(problems) > count:
            return None

        function, bean = self._callable()
        return Tool(
            on_unknown_outcome="retry",
            specification=ToolSpecification(self.function.__name__.lstrip("_") or tool.name),
            execution=execution,
            where=self.where,
            function=function,
            bean=bean,
            member=self.attribute,
            encode=lambda value: Encoded("", value),
            decode=lambda request: {},  # the arguments are given
            timeout=tool.timeout,
            visible=tuple(visible),
            **read_hidden(taken.parameters),
        )

    def _execution(self, tool: Tool) -> Execution:
        """Return where the compensation runs: where its marker says, else where the tool ran."""
        marks = [getattr(_plain(each), EXECUTION_MARK, None) for each in self.definitions]
        own = execution_of(self.function, next((mark for mark in marks if mark is not None), None))
        if any(marks) or inspect.iscoroutinefunction(self.function) or tool.execution.is_coroutine:
            return own
        return tool.execution

    def _callable(self) -> tuple[Any, Any]:
        """Return the function to call, or the bean whose method is called."""
        sibling = self.sibling
        if self.owner is None or sibling is None:
            return self.function, None
        if isinstance(self.raw, (staticmethod, classmethod)):
            return getattr(self.owner, self.attribute), None
        if sibling.bean is not None:
            return None, sibling.bean
        return getattr(getattr(sibling.function, "__self__", None), self.attribute), None


def _of_classes(tools: Sequence[Tool]) -> Iterator[_Marked]:
    """Yield the marked methods of the tools' classes and objects, each once."""
    seen: set[tuple[Any, ...]] = set()
    for tool in tools:
        if tool.owner is None:
            continue
        has_instance = tool.bean is not None or inspect.ismethod(tool.function)
        for name in dict.fromkeys(name for base in reversed(tool.owner.__mro__) for name in vars(base)):
            found = definitions_of(tool.owner, name)
            target = next((mark for each in found if (mark := compensated_by(each)) is not None), None)
            if target is None or not callable(getattr(found[0], "__func__", found[0])):
                continue
            needs_instance = not isinstance(found[0], (staticmethod, classmethod))
            if (needs_instance and not has_instance) or (tool.owner, name) in seen:
                continue
            seen.add((tool.owner, name))
            where = f"{tool.owner.__name__}.{name}"
            yield _Marked(where, _plain(found[0]), found[0], found, target, tool.owner, name, tool)


def _plain(function: Any) -> Any:
    return getattr(function, "__func__", function)


def _fits(visible: Sequence[ToolParameter], tool: Tool) -> bool:
    """Return True for one `ToolExecution`, and for the parameters of the tool."""
    if len(visible) == 1 and unwrapped(visible[0].annotation).type is ToolExecution:
        return True
    if tool.decode is None:
        return False
    return {each.name: _type_of(each) for each in visible} == {each.name: _type_of(each) for each in tool.visible}


def _type_of(parameter: ToolParameter) -> tuple[Any, bool]:
    return unwrapped(parameter.annotation).type, admits_none(parameter.annotation)


# --- undoing


async def undo_failed_round(invocation: Invocation, first: int) -> None:
    """Undo the successful tools of the invocation if a tool has failed in the round that begins at this execution."""
    if failed := _find_failed(invocation.state, first):
        await _await_to_its_end(_undo_round(invocation, failed), invocation)


def _find_failed(state: State, first: int) -> str | None:
    """Return the name of the first failed tool of the last reply, whose executions begin at this position."""
    failed = {identity_of(state.executions[position].request) for position in state.failed if position >= first}
    if not failed or state.response is None:
        return None
    requests = state.response.ai_message.tool_execution_requests
    return next((each.name for each in requests if identity_of(each) in failed), None)


@asynccontextmanager
async def compensating_failure(invocation: Invocation) -> AsyncIterator[None]:
    """Undo the successful tools of an invocation that fails as a whole: by an error, a limit or its cancellation."""
    try:
        yield
    except BaseException as error:
        # After a suspension is stored, the run waits for its answer, whatever the layers inside raise then.
        is_suspended = invocation.place is not None and invocation.place.run.has_left
        if invocation.has_begun and not is_suspended:
            # The caller of a cancelled method may have left, so its thread cannot run anything.
            caller_left = isinstance(error, (asyncio.CancelledError, GeneratorExit))
            await _await_to_its_end(_undo_failed(invocation, error, caller_left), invocation)
        raise


async def _undo_failed(invocation: Invocation, error: BaseException, caller_left: bool) -> None:
    """Undo all tools of the invocation that succeeded and have not been undone, the last one first.

    In a run the failure and the tools are recorded first, so that the invocation cannot succeed after a crash.
    """
    place = invocation.place
    if place is None or not place.run.is_stored:
        await _undo(invocation, _to_undo(invocation), invocation.undone, caller_left)
        return
    error = _error_to_record(error, invocation)
    if not isinstance(error, Exception) or place.run.stays_after(error):
        return
    listed, stored = _to_undo(invocation), invocation.stored
    if not listed and (stored is None or stored.failure is None):
        return
    failure = RecordedFailure.of(error, [fields_to_dict(each) for each in listed])

    async def fail() -> RecordedFailure:
        return failure

    if (recorded := await place.effect(FAILURE, fail)) is not failure:
        listed = [fields_from_dict(_Undo, each) for each in recorded.undo]
    await _undo(invocation, listed, invocation.undone, caller_left)


def _error_to_record(error: BaseException, invocation: Invocation) -> BaseException:
    """Return the error with which an invocation fails; a cancellation, if another process may continue the run."""
    error, deadline = invocation.error_behind(error), invocation.context.deadline
    if isinstance(error, asyncio.CancelledError) and deadline is not None and time.monotonic() >= deadline:
        # An outer call ends at its deadline, for every process, and its caller gets the error. This invocation fails
        # with it, and only its own layer can undo its tools.
        return TimeoutError(f"{invocation.where}: the time limit of an outer call is over")
    return error


async def _undo_round(invocation: Invocation, failed: str) -> None:
    """Undo the successful tools, and tell the model which of its calls were rolled back."""
    undone: dict[int, bool] = {}
    await _undo(invocation, _to_undo(invocation), undone)
    state = invocation.state
    messages = list(state.messages)
    for position, index in state.result_positions().items():
        if position not in undone:
            continue
        message: Any = messages[index]
        name = message.tool_name
        text = f"Tool {name!r} was executed successfully but was rolled back due to failure of tool {failed!r}"
        if not undone[position]:
            text = f"Tool {name!r} was executed successfully; undoing it after the failure of tool {failed!r} failed"
        messages[index] = ToolExecutionResultMessage(message.id, name, text, True, message.attributes)
    invocation.state = state.changed(messages=tuple(messages))


@dataclass(frozen=True, slots=True)
class _Undo:
    """An execution to undo. `arguments` are those that its tool ran with, as JSON values by the model's names."""

    position: int
    execution: StoredExecution
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def execution_that_ran(self) -> ToolExecution:
        """Return the execution for its compensation: its request has the arguments that ran."""
        given = json.dumps(dict(self.arguments), ensure_ascii=False)
        request = replace(self.execution.request, arguments=given)
        return replace(self.execution, request=request, arguments=self.arguments)

    def call_that_ran(self, invocation: Invocation) -> ToolCall:
        """Return the call with the arguments that ran. Raises `ToolArgumentsError` if they cannot be read back."""
        call = _stored_call(self.execution.request, invocation)
        here = invocation.environment.attempts_of(self.execution.request).succeeded
        if here is None or here.arguments is None:
            return with_recorded_arguments(call, self.arguments)
        ran = call.with_arguments(here.arguments)
        try:  # the tool may have changed its arguments in place
            return with_recorded_arguments(ran, self.arguments, call)
        except ToolArgumentsError:
            return ran


def _to_undo(invocation: Invocation) -> list[_Undo]:
    """Return the successful executions that have a compensation and are not undone, the last one first."""
    compensations, state = _compensations_in(invocation), invocation.state
    to_undo = _positions_that_ran(state) - state.undone
    return [
        _Undo(position, execution, _arguments_that_ran(position, execution, invocation))
        for position, execution in reversed(list(enumerate(state.all_executions)))
        if position in to_undo and _name_now(execution, invocation) in compensations
    ]


def _arguments_that_ran(position: int, execution: ToolExecution, invocation: Invocation) -> Mapping[str, Any]:
    """Return the arguments that a tool ran with; in a state of an earlier version, the model's unless it has others."""
    if given := execution.arguments or invocation.state.arguments.get(position):
        return given
    with suppress(ToolArgumentsError):
        return _stored_call(execution.request, invocation).written_arguments()
    return {}


def _stored_call(request: ToolExecutionRequest, invocation: Invocation) -> ToolCall:
    """Return a stored call as the model made it. Raises `ToolArgumentsError` if its arguments are not valid."""
    tool, environment = invocation.find_tool(request.name), invocation.environment
    assert tool is not None
    arguments = None if tool.decode is None else tool.decode(request)
    return ToolCall(tool, request, arguments, environment.context, environment)


async def _undo(
    invocation: Invocation, listed: Sequence[_Undo], done: dict[int, bool], caller_left: bool = False
) -> None:
    """Call the compensations in this order. `done` gets True or False (failed) by the position of the execution."""
    compensations = _compensations_in(invocation)
    for each in listed:
        state, position, execution = invocation.state, each.position, each.execution
        if position in state.undone:  # by an undoing that has begun before, and takes too long
            continue
        compensation = compensations.get(_name_now(execution, invocation))
        if compensation is None:
            logger.error("cannot undo tool %r: this program has no compensation for it", execution.request.name)
            continue
        invocation.state = state.changed(undone=state.undone | {position})
        failure: Exception | None = None
        try:
            await _call(compensation, each, invocation, caller_left, _place_of(position, invocation))
        except Exception as error:
            if invocation.place is not None and invocation.place.run.stays_after(error):
                raise  # another process continues the run
            failure = error
            logger.error(
                "%s failed to undo tool %r: %s",
                compensation.where,
                execution.request.name,
                error,
                exc_info=own_frames(error),
            )
        done[position] = failure is None
        undone = Compensation(
            execution.request.name, dict(each.arguments), None if failure is None else message_of(failure)
        )
        state = invocation.state
        invocation.state = state.changed(compensations=(*state.compensations, undone))


def _name_now(execution: ToolExecution, invocation: Invocation) -> str:
    """Return the present name of the tool of an execution, which a stored run may know by a former one."""
    tool = invocation.find_tool(execution.request.name)
    return execution.request.name if tool is None else tool.name


def _positions_that_ran(state: State) -> frozenset[int]:
    """Return the positions in `all_executions` of the tools that ran without an error, whatever the model read."""
    outcomes = [each.outcome for each in state.pending if each.outcome is not None]
    current = {at for at, each in enumerate(outcomes, start=len(state.executions)) if each.ran and not each.failed}
    return (state.ran - state.failed) | current


def _compensations_in(invocation: Invocation) -> Mapping[str, Tool]:
    plan, toolset = invocation.plan, invocation.toolset
    if toolset is plan.toolset:
        return plan.compensations
    found, problems = compensations_of(toolset.tools)
    for each in problems:
        logger.error("%s", each)
    return {**found, **plan.compensations}


def _place_of(position: int, invocation: Invocation) -> PlaceInRun | None:
    """Return the place of a compensation in the run of the invocation; None without a run."""
    return None if invocation.place is None else invocation.place.to_undo(position)


async def _call(
    compensation: Tool,
    undo: _Undo,
    invocation: Invocation,
    caller_left: bool,
    place: PlaceInRun | None,
) -> None:
    """Run one compensation where its tool ran, in a new call scope. With a `place`, it is recorded and runs once."""
    environment, request = invocation.environment, undo.execution.request
    context = replace(in_tool(environment.context, request, Cancellation()), place=place)
    environment = replace(environment, attempts={})  # the compensation is a call of the same request
    if caller_left:
        environment = replace(environment, runner=LoopRunner(invocation.host.workers))
    copied = copy_context()
    copied.run(current_invocation.set, context)
    call = ToolCall(compensation, request, _arguments(compensation, undo, invocation), context, environment)
    run = run_tool if environment.listeners is None else _with_event(environment.listeners, undo)
    step = run(call) if place is None else place.run_tool(run, call)
    await asyncio.create_task(_awaiting(step), context=copied)


def _with_event(listeners: Listeners, undo: _Undo) -> ToolStep:
    """Return the step that runs a compensation and sends its event. One whose result is recorded has had its event."""

    async def run(call: ToolCall) -> Any:
        began, undone = perf_counter(), (call.request.name, dict(undo.arguments))
        try:
            value = await run_tool(call)
        except Exception as error:
            listeners.tell(CompensatedEvent(call.context, *undone, error, perf_counter() - began))
            raise
        listeners.tell(CompensatedEvent(call.context, *undone, None, perf_counter() - began))
        return value

    return run


async def _awaiting(step: Any) -> None:
    await step


def _arguments(compensation: Tool, undo: _Undo, invocation: Invocation) -> dict[str, Any]:
    """Return the execution, or the arguments that the tool ran with, for the compensation's parameters."""
    visible = compensation.visible
    if len(visible) == 1 and unwrapped(visible[0].annotation).type is ToolExecution:
        return {visible[0].name: undo.execution_that_ran()}
    given = undo.call_that_ran(invocation).visible_arguments()
    return {each.name: given[each.name] for each in visible if each.name in given}


async def _await_to_its_end(work: Coroutine[Any, Any, None], invocation: Invocation) -> None:
    """Await `work`, which the container knows and waits for. A cancellation of the call is raised afterwards.

    A call that left at once would undo the same tools again: as the failure that its cancellation is, or in the next
    execution of its run. And its turn would say that they remain done. Work that takes longer continues without it.
    """
    where = f"{invocation.where} (compensation)"

    async def tracked() -> None:
        with invocation.host.running.undoing(where):
            await work

    def log_error(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("%s failed: %s", where, error, exc_info=error)

    task = asyncio.create_task(tracked())

    async def wait() -> None:
        await asyncio.wait([task])

    try:
        await finish_before_cancellation(wait(), undo_failed_round, invocation.host.running.stop_timeout)
    except asyncio.CancelledError:
        task.add_done_callback(log_error)  # nobody else sees it
        raise
    await task
