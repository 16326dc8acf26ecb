"""Defines one invocation of a service method: its arguments, tools, messages, deadline and state.

Includes `Running`, which tracks open calls, and `invocation_record`. Not here: performing effects (`driver`).
"""

from __future__ import annotations

import asyncio
import inspect
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Any, Protocol, TypeAlias, cast

from ..bean_references import BeanReference
from ..chat import (
    CONTENT_TYPES,
    ChatModel,
    ChatRequest,
    ChatRequestParameters,
    ChatResponse,
    Message,
    StreamEvent,
    SystemMessage,
    TokenUsage,
    ToolExecution,
    UserMessage,
)
from ..context import (
    ActiveScope,
    InvocationContext,
    complete_context,
    current_attributes,
    current_invocation,
    current_limit,
)
from ..errors import (
    IllegalConfigurationError,
    InvocationTimeoutError,
    McpConnectionError,
    McpError,
    Problem,
    RunIncompatibleError,
    RunNotFoundError,
    RunSuspendedError,
)
from ..events import Listeners
from ..execution.cancellation import CancellationsHere
from ..execution.markers import BLOCKING, COROUTINE, EXECUTION_MARK, execution_of, is_async
from ..execution.runners import CallerRunner, LoopRunner, Runner
from ..execution.threads import Workers, call_on
from ..introspection import type_name
from ..limits import Account, CostEstimator, UsageLimitExceededError, current_account
from ..models.pools import ConnectionPools
from ..models.routing import names_of_router, router_in
from ..security import identity_in
from ..tools.failures import ToolErrors
from ..tools.function_calls import with_layers
from ..tools.sources import ToolProviderRequest, ToolProviderResult, read_each
from ..tools.tool_calls import InjectedParameter, Tool, ToolEnvironment, ToolSuspension, read_injected
from .answers import restored_result
from .loop import (
    CallModel,
    Effect,
    Finish,
    ModelReplied,
    Rules,
    RunTool,
    Suspend,
    ToolFinished,
    ToolSuspended,
    begin,
    next_effect,
    request_of,
)
from .memory import Caller, ChatMemories, ChatMemoryKey, caller_here
from .outputs import ANSWER_TOOL, OutputMode, Result, Shape
from .plans import (
    FunctionMessage,
    MethodPlan,
    Provider,
    Template,
    Toolset,
    current_additional_tools,
    suspensions_in,
    text_of,
)
from .recording_needs import PlaceInRun, StoredInvocation
from .state import State

# --- open calls


class Closable(Protocol):
    """A stream that can be closed."""

    async def aclose(self) -> None:
        """Cancel the stream."""
        ...


class Running:
    """Tracks the tasks of invocations, and the streams that wait for their readers."""

    def __init__(self) -> None:
        self._tasks: dict[int, tuple[str, asyncio.Task[object] | None]] = {}
        self._streams: dict[int, tuple[weakref.ref[Closable], asyncio.Task[None]]] = {}
        self._numbers = count()
        self._ended = asyncio.Event()

    @contextmanager
    def task(self, label: str) -> Iterator[None]:
        """Track the current task as the task of an invocation inside the block."""
        number = next(self._numbers)
        self._tasks[number] = (label, asyncio.current_task())
        try:
            yield
        finally:
            del self._tasks[number]
            self._ended.set()

    def open_stream(self, stream: Closable, task: asyncio.Task[None]) -> None:
        """Track an open stream until its task ends, with a weak reference: a stream that is dropped ends its task."""
        number = next(self._numbers)
        self._streams[number] = (weakref.ref(stream), task)
        task.add_done_callback(lambda _: self._streams.pop(number, None))

    async def stop(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds for the invocations, then cancel them; close the open streams.

        Returns the labels of the cancelled invocations.
        """
        await self._wait_for_the_end(timeout)
        late = self._under_way()
        for _, task in late:
            if task is not None:
                task.cancel()
        if late:
            await self._wait_for_the_end(1.0)
        closing = [asyncio.create_task(_close(*each)) for each in list(self._streams.values())]
        if closing:
            _, late_to_close = await asyncio.wait(closing, timeout=max(timeout, 1.0))
            for each in late_to_close:
                each.cancel()
            for each in set(closing) - late_to_close:
                each.result()
        return sorted(label for label, _ in late)

    def _under_way(self) -> list[tuple[str, asyncio.Task[object] | None]]:
        current = asyncio.current_task()
        return [(label, task) for label, task in self._tasks.values() if task is not current]

    async def _wait_for_the_end(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._under_way():
                    self._ended.clear()
                    await self._ended.wait()


async def _close(stream: weakref.ref[Closable], task: asyncio.Task[None]) -> None:
    """Close a stream, or wait for the end of one that was dropped a moment ago."""
    if (open_stream := stream()) is not None:
        await open_stream.aclose()
    elif task.get_loop() is asyncio.get_running_loop():
        await asyncio.wait([task])


# --- one invocation

DEFAULT_MODEL = "default"
"""The name of the model of services that do not name one."""

Perform: TypeAlias = Callable[
    [CallModel | RunTool, "Invocation"], Awaitable[ModelReplied | ToolFinished | ToolSuspended]
]
"""Performs one effect, a model request or a tool call, and returns its result."""


class ServiceHost(Protocol):
    """Hosts services: a container, or `create_ai_service`."""

    workers: Workers
    running: Running
    scope: ActiveScope
    failures: ToolErrors
    max_concurrent_tools: int
    listeners: Listeners | None

    @property
    def runs(self) -> Any:
        """The runs, for durable methods."""
        ...

    @property
    def abandon_runs(self) -> Callable[[BaseException], Awaitable[list[str]]]:
        """Return the function that cancels the runs of a `RunSuspendedError` that left a tool.

        It returns the names of the services of these runs.
        """
        ...

    def new_run(self, run_id: str | None) -> PlaceInRun:
        """Return the place of the outermost invocation of a new run; without an id, it gets one."""
        ...

    def tool_may_suspend(self, tool: Tool) -> bool:
        """Return True if a call of this tool may be suspended."""
        ...

    @property
    def added_may_suspend(self) -> bool:
        """True if calls of tools that code outside of services adds may be suspended."""
        ...

    async def suspended_run(self, key: ChatMemoryKey) -> str | None:
        """Return the id of the suspended run of a conversation."""
        ...

    async def cancel_run(self, run_id: str, reason: str) -> str:
        """Cancel a suspended run. Returns the qualified name of its service."""
        ...

    running_loop: asyncio.AbstractEventLoop | None
    """The event loop of a started container; None for all others. Cheaper than `loop`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of invocations; None for the caller's loop. Raises `ContainerNotStartedError`."""
        ...

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop for synchronous methods."""
        ...

    @property
    def pools(self) -> ConnectionPools | None:
        """The connections that the models share; None without a container."""
        ...

    def watching(self, name: str, model: ChatModel) -> AbstractContextManager[Callable[[], None]]:
        """See `AskingHost.watching`."""
        ...

    async def model(self, name: str | None, context: InvocationContext | None = None, /) -> ChatModel:
        """Return the named model, or the default one, from the active scope. `context` is that of its events."""
        ...

    async def chosen_model(self, name: str, where: str, context: InvocationContext) -> ChatModel:
        """Return the model that a call chose. Raises `IllegalConfigurationError` for an unknown name."""
        ...

    async def memories(self) -> ChatMemories:
        """Return the conversations."""
        ...

    async def cost_estimator(self) -> CostEstimator | None:
        """Return the bean that estimates costs, if there is one."""
        ...

    def class_behind(self, cls: type[Any]) -> type[Any]:
        """Return the class of the bean that provides `cls`: a subclass, or `cls` itself."""
        ...

    def tool_problems(self, where: str, tool: Tool) -> Iterable[Problem]:
        """Yield problems with a tool in this host: missing beans, an unknown executor."""
        ...


async def abandon_runs(
    error: BaseException, cancel_run: Callable[[str, str], Awaitable[str]], own: str | None = None
) -> list[str]:
    """Cancel the runs of a `RunSuspendedError`, also those in groups: a tool or guardrail let it through.

    The run with the id `own` is kept. Returns the names of the services of the others.
    """
    services = []
    for each in suspensions_in(error):
        if each.run_id == own:
            continue
        each.is_abandoned = True
        service = each.pending[0].service if each.pending else "the service"
        with suppress(RunNotFoundError):  # a run of another host
            service = await cancel_run(each.run_id, "the call that needed its result has ended")
        services.append(service.rpartition(".")[2])
    return services


class PieceSink(Protocol):
    """Receives the pieces of a streamed reply."""

    async def put(self, event: StreamEvent) -> None:
        """Pass on one piece, and wait until the next one is requested."""
        ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of an invocation in `time.monotonic()` seconds, and its limit in seconds for the error."""

    at: float
    limit: float


class Invocation:
    """One call of a service method.

    `state` is the current state, once it `has_begun`, and `end` is the last effect. `history` is the conversation so
    far; a layer may set `history` and `user_message` before the invocation begins. With a `state`, it resumes there.
    `message` is the user message, if it is not that of the arguments.
    """

    model: ChatModel
    model_name: str
    toolset: Toolset
    rules: Rules
    environment: ToolEnvironment
    state: State
    has_begun = False
    end: Effect | None = None
    pieces: PieceSink | None = None
    before_end: Callable[[Finish], None] | None = None
    history: tuple[Message, ...] = ()
    _added: Sequence[Tool] = ()
    added_by = ""
    """The place that adds tools to this call; see `tools_added`."""
    dynamic_providers: tuple[Provider, ...] = ()
    unreachable: tuple[McpConnectionError, ...] = ()
    is_input_checked = False
    """True if the input guardrails have judged the user message before the run was stored."""
    has_other_message = False
    """True if an input guardrail has replaced the user message."""
    is_admitted = False
    """True if the roles of the caller were checked when the call was made."""
    account: Account | None = None
    refused: UsageLimitExceededError | None = None
    deadline: Deadline | None = None
    limit: asyncio.Timeout | None = None
    """The timeout that ends the invocation at its deadline, while it runs."""
    _step: StepOfTask | None = None
    _call_options: ChatRequestParameters | None = None

    def __init__(
        self,
        plan: MethodPlan,
        host: ServiceHost,
        arguments: Mapping[str, Any],
        *,
        as_tool: bool = False,
        on_loop: bool = False,
        state: State | None = None,
        place: PlaceInRun | None = None,
        message: UserMessage | None = None,
    ) -> None:
        outer = current_invocation.get()
        if place is None and (as_tool or plan.may_suspend or plan.has_inner_provider):
            place = _place_of(plan, host, outer if as_tool else None, arguments)
        restored = None
        if place is not None:
            plan, restored = plan.in_run, place.session.restored(place.path)
        self.plan, self.host, self.arguments, self.place = plan, host, arguments, place
        self._resumed = state if restored is None else restored.state
        self.together = bool(plan.options.concurrent_tools)
        self.yields_suspension = plan.output.shape is Shape.EVENT_STREAM
        self.runner = self._choose_runner(as_tool, on_loop)
        memory_id = None if as_tool or plan.memory_parameter is None else arguments[plan.memory_parameter]
        remembers = plan.window is not None and memory_id is not None
        self.memory_key = ChatMemoryKey.of(plan.service, memory_id) if remembers else None
        self.caller: Caller | None = caller_here() if remembers else None
        self.deadline, earliest = self._deadlines(outer)
        if restored is None:
            self.user_message = self._user_message() if message is None else message
        else:
            self._continue(restored)
            if self.deadline is not None:
                earliest = self.deadline.at if earliest is None else min(earliest, self.deadline.at)
        self.context = InvocationContext(
            service=plan.service,
            method=plan.name,
            memory_id=memory_id,
            user_message=self.user_message,
            attributes=current_attributes.get(),
            deadline=earliest,
            outer_invocation_id=outer.invocation_id if outer is not None else None,
        )
        if restored is not None:
            self.context.notes.update(restored.notes)
        added = current_additional_tools.get()
        if added is not None and added[1] is outer:
            self._added, self.added_by = added[0], added[2]
        self.account = self._open_account(restored)

    def _choose_runner(self, as_tool: bool, on_loop: bool) -> LoopRunner:
        """Return the runner of the tools: with the thread of the caller, if one waits for a synchronous method."""
        pool = self.plan.options.concurrent_tools
        # In a run that continues elsewhere, no caller waits on a thread.
        continues = self.place is not None and self.place.session.generation is not None and not as_tool
        kind = LoopRunner if self.plan.is_async or on_loop or continues else CallerRunner
        return kind(self.host.workers, pool if isinstance(pool, Executor) else None)

    def _open_account(self, restored: StoredInvocation | None) -> Account | None:
        """Return the account that counts the usage, if this invocation or one around it has limits."""
        around, limits = current_account.get(), self.plan.options.limits
        if self.place is not None:
            limits = self.place.session.limits_of(self.place.path, limits)
        if around is None and limits is None:
            return None
        account = Account(limits, around, self)
        if restored is not None:
            restored.account_for(account)
        return account

    def _continue(self, restored: StoredInvocation) -> None:
        """Take the user message and the deadline of an invocation that was stored."""
        self.user_message = _last_user_message((*restored.state.history, *restored.state.messages[:1]))
        if restored.remaining is None:
            around = current_limit.get()
            self.deadline = None if around is None else Deadline(around.deadline, around.seconds)
            return
        limit = self.plan.call_limits.timeout or restored.remaining
        left = Deadline(time.monotonic() + restored.remaining, limit)
        if self.deadline is None or left.at < self.deadline.at or self.plan.call_limits.timeout is not None:
            self.deadline = left

    def _deadlines(self, outer: InvocationContext | None) -> tuple[Deadline | None, float | None]:
        """Return the deadline that this invocation enforces, and the earliest known one."""
        own, around = self.plan.call_limits.timeout, current_limit.get()
        enforced = Deadline(time.monotonic() + own, own) if own is not None else None
        known: list[float | None] = [outer.deadline if outer is not None else None]
        if around is not None:
            known.append(around.deadline)
            if around.within is outer and (enforced is None or around.deadline < enforced.at):
                enforced = Deadline(around.deadline, around.seconds)
        if enforced is not None:
            known.append(enforced.at)
        return enforced, min((each for each in known if each is not None), default=None)

    @property
    def is_late(self) -> bool:
        """True if the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline.at

    def move_deadline(self, seconds: float) -> None:
        """Let the invocation end later. Called before it begins."""
        assert self.deadline is not None
        self.deadline = replace(self.deadline, at=self.deadline.at + seconds)
        complete_context(self.context, deadline=self.deadline.at)

    def timed_out(self) -> InvocationTimeoutError:
        """Return the error for a deadline that has passed."""
        limit = self.deadline.limit if self.deadline is not None else 0.0
        return InvocationTimeoutError(self.plan.service.__name__, self.plan.name, limit)

    def caller_runner(self) -> CallerRunner:
        """Return the runner that uses the thread of the caller, which waits for this invocation."""
        assert isinstance(self.runner, CallerRunner)
        self.runner.has_deadline = self.deadline is not None
        return self.runner

    # --- limits

    @property
    def where(self) -> str:
        """The place of the call, for messages."""
        return self.plan.where

    def count_tool_calls(self, response: ChatResponse) -> int:
        """Return the number of tool calls in a reply, without the call that is the answer itself."""
        requests = response.ai_message.tool_execution_requests
        if self.rules.structure is None or self.state.mode != "tool":
            return len(requests)
        return sum(each.name != ANSWER_TOOL for each in requests)

    def end_with(self, error: UsageLimitExceededError) -> None:
        """End this invocation with `error`, from any thread: cancel the task that runs its current step."""
        if self.refused is None:
            self.refused = error
        if (step := self._step) is not None:
            step.interrupt()

    def step(self) -> AbstractAsyncContextManager[None]:
        """Run a step of this invocation in the current task, inside the block: `end_with` can interrupt it."""
        return StepOfTask(self)

    def during(self, step: StepOfTask | None) -> None:
        """Set the step that runs now."""
        self._step = step

    @property
    def starts_early(self) -> bool:
        """True if tools may start before a reply is complete. A limit may still refuse the whole reply."""
        is_recorded = self.place is not None and self.place.session.generation is not None
        return self.together and self.account is None and not is_recorded

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The messages of this call so far."""
        if self.has_begun:
            return self.state.all_messages
        return () if self.plan.continues_history else (self.user_message,)

    @property
    def is_resumed(self) -> bool:
        """True if the invocation continues from a stored state."""
        return self._resumed is not None

    @property
    def needs_check_of_input(self) -> bool:
        """True if input guardrails must judge the user message. A resumed invocation has passed them."""
        return self.plan.layers.check_input is not None and not (self.is_resumed or self.is_input_checked)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages before the user message: those of the conversation, then those of parameters."""
        history = (*self.history, *self._given_history())
        return history[:-1] if self.plan.continues_history and self.ends_with_user_message else history

    def _given_history(self) -> tuple[Message, ...]:
        return tuple(each for name in self.plan.history for each in self.arguments[name] or ())

    @property
    def ends_with_user_message(self) -> bool:
        """True if the first request ends with the user message; else a history that ends with results of tools."""
        return not self.plan.continues_history or isinstance(self._given_history()[-1], UserMessage)

    def replace_user_message(self, message: UserMessage) -> None:
        """Replace the user message before anything is sent. The context has the new one from now on."""
        self.user_message, self.has_other_message = message, True
        complete_context(self.context, user_message=message)

    # --- starting

    async def open(self) -> Effect:
        """Find the model and the tools, and begin or resume. Returns the first effect."""
        plan, host = self.plan, self.host
        if plan.call_options is not None:
            self._call_options = self._given_options(plan.call_options)
        options = self._call_options
        router = plan.options.model if router_in(plan.options.model) is not None else None
        recorded = self._resumed.model if self._resumed is not None else None
        chosen = options.model if options is not None else None
        own = None if router is not None else plan.options.model or DEFAULT_MODEL
        if recorded is not None and recorded != own:
            self.model_name, self.model = recorded, await self._recorded_model(recorded)
        elif chosen is not None and recorded is None:
            self.model_name, self.model = chosen, await host.chosen_model(chosen, plan.where, self.context)
        elif own is not None:
            self.model_name = str(own)
            self.model = await host.model(self.model_name, self.context)
        toolset = plan.toolset
        if self._added or plan.providers or toolset.is_restricted:
            toolset = await self._offered()
            plan = self.plan  # another one, if the tools may suspend the call
        self.toolset = toolset
        self.rules = plan.rules if options is None and toolset is plan.toolset else self._rules_for(toolset)
        self.environment = ToolEnvironment(
            tools=toolset.by_name,
            context=self.context,
            scope=host.scope,
            runner=self.runner,
            failures=plan.failures.over(host.failures) if plan.has_handlers else host.failures,
            max_result_chars=plan.call_limits.max_result_chars,
            on_unknown_outcome=plan.options.on_unknown_outcome,
            listeners=host.listeners,
            loop=host.running_loop,
            ran={},
            abandon_runs=host.abandon_runs,
            model=host.model,
        )
        if self._resumed is not None:
            found = (toolset.stored(name) for name in self._resumed.offered)
            # Those of the stored request come first, and then what only this version of the program has.
            names = [*(tool.name for tool in found if tool is not None), *self.rules.names]
            self.state = self._resumed.with_results(self._restored_result).changed(offered=tuple(dict.fromkeys(names)))
            self.has_begun = True
            self.environment.sent = self.state.sent
            if self.dynamic_providers:  # the state may use their tools
                await self.add_dynamic_tools([*self.state.history, *self.state.messages])
            if self.place is not None:
                self.place.session.raise_failure(self.place.path)
            if router is not None and chosen is None and recorded is None:  # of a version without a router
                await self._route(router, request_of(self.rules, self.state))
            return next_effect(self.rules, self.state)
        system = await self._system_message() if plan.system is not None else None
        history = self.conversation if plan.history else self.history
        asked: UserMessage | None = self.user_message
        if plan.continues_history:
            history, asked = (*history, self.user_message) if self.ends_with_user_message else history, None
        if router is not None and chosen is None:
            _, effect = self._begin("schema", system, history, asked)
            assert isinstance(effect, CallModel)
            await self._route(router, effect.request)
        state, effect = self._begin("schema" if self._supports_schemas else "prompt", system, history, asked)
        self.state = state.changed(model=self.model_name)
        self.has_begun = True
        return effect

    def _begin(
        self,
        by_model: OutputMode,
        system: SystemMessage | None,
        history: Sequence[Message],
        asked: UserMessage | None,
    ) -> tuple[State, Effect]:
        """Return the first state and effect. `by_model` is how the model is asked for a structured answer."""
        structure = self.plan.output.structure
        mode: OutputMode = "prompt" if structure is None else self._mode(by_model)
        prompted = None
        if structure is not None and mode == "prompt":
            user = self.user_message if self.ends_with_user_message else UserMessage(())
            prompted = UserMessage([*user.contents, structure.instructions], user.name, user.attributes)
        return begin(self.rules, system, history, asked, prompted=prompted, mode=mode)

    async def _route(self, router: Any, request: ChatRequest) -> None:
        """Take the model that the router chooses, or has chosen before this process continued the run."""
        place = self.place
        recorded = None if place is None else place.session.model_at(place.path)
        if recorded is not None:
            self.model_name, self.model = recorded, await self._recorded_model(recorded)
            return
        self.model_name = await self._routed(router, request)
        self.model = await self.host.model(self.model_name, self.context)
        if place is not None:
            await place.session.record_model(place.path, self.model_name)

    async def _routed(self, router: Any, request: ChatRequest) -> str:
        """Ask the router for the name of the model. Raises `IllegalConfigurationError` for a name that it lacks."""
        bean = await BeanReference.to(router).find(self.host.scope)
        choose = bean.choose
        execution = execution_of(choose, getattr(choose, EXECUTION_MARK, None))
        place = f"{type(bean).__name__}.choose"
        name = await self.runner.run(execution, lambda: choose(request, self.context), place)
        if name not in names_of_router(bean):
            known = ", ".join(names_of_router(bean))
            fact = f"it chose the model {name!r}, which is not one of its names: {known}"
            raise IllegalConfigurationError([Problem(place, fact, "add it to `names`, or choose one of them")])
        return str(name)

    async def _recorded_model(self, name: str) -> ChatModel:
        """Return the model of a stored invocation. Raises `RunIncompatibleError` if this program has lost it."""
        try:
            return await self.host.chosen_model(name, self.plan.where, self.context)
        except IllegalConfigurationError as error:
            if self.place is None:
                raise
            raise RunIncompatibleError(self.place.session.id, error.problems[0].what) from error

    def _restored_result(self, name: str, written: Any) -> Any:
        """Return the stored result of a tool in the tool's return type, if this program still has the tool."""
        tool = self.toolset.stored(name)
        return written if tool is None else restored_result(tool.returns, written)

    def _rules_for(self, toolset: Toolset) -> Rules:
        plan, options = self.plan, self._call_options
        rules = plan.rules_of(toolset)
        return rules if options is None else plan.rules_of_call(rules, options)

    def _given_options(self, parameter: str) -> ChatRequestParameters | None:
        """Return the options of this call. Raises `TypeError` for a value of another type."""
        given = self.arguments[parameter]
        if given is not None and not isinstance(given, ChatRequestParameters):
            where = f"{self.plan.where}(): {parameter}"
            raise TypeError(f"{where} must be a ChatRequestParameters or None, got {type(given).__name__}")
        return given

    @property
    def _supports_schemas(self) -> bool:
        return bool(getattr(self.model, "supports_response_format", False))

    def _mode(self, by_model: OutputMode) -> OutputMode:
        mode = self.plan.options.output_mode
        if mode is not None and not (mode == "tool" and self.plan.output.is_stream):
            return mode
        return by_model

    def _values(self) -> dict[str, Any]:
        return {name: self.arguments[parameter] for name, parameter in self.plan.values.items()}

    def _user_message(self) -> UserMessage:
        """Return the user message. Raises `TypeError` if it is None."""
        plan = self.plan
        if plan.continues_history:
            return _last_user_message(self._given_history())
        given = self.arguments[plan.user_parameter] if plan.user is None and plan.user_parameter is not None else None
        if isinstance(given, str) and not plan.contents:
            return UserMessage(given)
        contents: list[Any] = []
        if plan.user is not None:
            contents.append(plan.user.render(self._values()))
        for name in plan.spoken:
            value = self.arguments[name]
            if name == plan.user_parameter:
                contents += UserMessage(self._user_contents(value)).contents
            elif value is not None:
                contents += UserMessage(value).contents
        if isinstance(given, UserMessage):
            return UserMessage(contents, given.name, given.attributes)
        return UserMessage(contents)

    def _user_contents(self, value: object) -> Any:
        match value:
            case UserMessage(contents):
                return contents
            case None if self.plan.contents:
                return ()
            case None:
                where = f"{self.plan.where}(): {self.plan.user_parameter}"
                raise TypeError(f"{where} is the user message and must not be None")
            case other if isinstance(other, (str, list, tuple, *CONTENT_TYPES)):
                return other
            case other:
                return text_of(other)

    async def _system_message(self) -> SystemMessage | None:
        plan = self.plan
        match plan.system:
            case Template() as template:
                return SystemMessage(template.render(self._values()))
            case FunctionMessage(function) as message:
                beans = await _beans_for(message.injected, self.host.scope)
                kind = COROUTINE if is_async(function) else BLOCKING
                text = await self.runner.run(kind, lambda: function(self.context, **beans), plan.where)
                if not isinstance(text, str):
                    returned = type(text).__name__
                    raise TypeError(f"the system message function of {plan.where} returned {returned}, not str")
                return SystemMessage(text)
        return None

    # --- additional tools

    async def _offered(self) -> Toolset:
        """Return the method's tools with those of enclosing blocks and of providers.

        Tools that the identity may not call are left out first, so that nothing names them. Raises
        `IllegalConfigurationError` for tools that cannot be added.
        """
        plan = self.plan
        own = plan.toolset
        if own.is_restricted:
            own = plan.visible_to(await identity_in(self.host.scope))
        toolset = own.joined_by(await self.allowed(self._added), plan)
        for provider in plan.providers:
            found = await self._found(provider)
            if getattr(found.given, "dynamic", False) is True:
                self.dynamic_providers = (*self.dynamic_providers, found)
            else:
                toolset = toolset.joined_by(await self._tools_of(found, await self._names_in_use(toolset)), plan)
        if toolset is not own and (problems := tuple(plan.offer_problems(toolset))):
            raise IllegalConfigurationError(problems)
        may_suspend = self.dynamic_providers or any(self.host.tool_may_suspend(tool) for tool in toolset.tools)
        if self.place is None and may_suspend:
            self.place = _place_in_new_run(plan, self.host, self.arguments)
            self.plan = plan.in_run
            toolset = Toolset.of([with_layers(tool, self.plan.layers.tools) for tool in toolset.tools])
        return toolset

    async def allowed(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that the current identity may call."""
        if all(each.access is None for each in tools):
            return tuple(tools)
        identity = await identity_in(self.host.scope)
        return tuple(each for each in tools if each.access is None or each.access.allows(identity))

    async def add_dynamic_tools(self, messages: Sequence[Message]) -> bool:
        """Ask the dynamic providers, and add tools with new names. Returns True if there are any.

        Raises `IllegalConfigurationError` for tools that cannot be added.
        """
        toolset, plan = self.toolset, self.plan
        for provider in self.dynamic_providers:
            tools = await self._tools_of(provider, await self._names_in_use(toolset), tuple(messages))
            toolset = toolset.joined_by([tool for tool in tools if tool.name not in toolset.by_name], plan)
        if toolset is self.toolset:
            return False
        if problems := tuple(plan.offer_problems(toolset)):
            raise IllegalConfigurationError(problems)
        self.toolset, self.rules = toolset, self._rules_for(toolset)
        self.environment.tools = toolset.by_name
        self.state = self.state.changed(offered=self.rules.names)
        return True

    async def _tools_of(
        self, provider: Provider, tool_names: tuple[str, ...], messages: tuple[Message, ...] = ()
    ) -> Sequence[Tool]:
        """Return the tools of a provider that was found. Raises `IllegalConfigurationError` for invalid ones."""
        where = self.plan.where
        provided = await self._provided_by(provider.given, tool_names, messages)
        tools, problems = read_each(provided, where, self.host.class_behind)
        tools = await self.allowed(tools)
        problems += tuple(problem for tool in tools for problem in self.host.tool_problems(where, tool))
        if problems:
            raise IllegalConfigurationError(problems)
        return tools

    async def _names_in_use(self, toolset: Toolset) -> tuple[str, ...]:
        """Return the names that a provider's tools cannot have: those of the tools, and of the search tool."""
        search = self.plan.options.tool_search
        if search is None:
            return tuple(toolset.by_name)
        strategy = await BeanReference.to(search).find(self.host.scope)
        return (*toolset.by_name, strategy.specification.name)

    async def _found(self, provider: Provider) -> Provider:
        return provider if provider.bean is None else Provider(await self.host.scope.aget(provider.bean))

    async def _provided_by(
        self, bean: Any, tool_names: tuple[str, ...], messages: tuple[Message, ...]
    ) -> Sequence[Any]:
        plan, context = self.plan, self.context
        provide = getattr(bean, "provide_tools", bean)
        request = ToolProviderRequest(self.user_message, context.memory_id, context, tool_names, messages)
        kind = COROUTINE if is_async(provide) else BLOCKING
        try:
            provided = await self.runner.run(kind, lambda: provide(request), f"{plan.where} tool provider")
        except McpError as error:
            if self._resumed is None or self.place is None:
                raise
            if self.place.session.cancels:  # its tools are undone, and none of the server's is called
                return ()
            # A server that is away for a minute must not end a run that waited for a day.
            raise RunIncompatibleError(self.place.session.id, str(error)) from error
        tools = provided
        if isinstance(provided, ToolProviderResult):
            tools = provided.tools
            self.unreachable = (*self.unreachable, *provided.unreachable)
        if tools is None:
            return ()
        if isinstance(tools, Mapping):
            return (tools,)
        if isinstance(tools, (list, tuple)):
            return tools
        fact = f"the tool provider {type_name(type(bean))} returned {tools!r}"
        raise IllegalConfigurationError([Problem(plan.where, fact, "return a ToolProviderResult, or None")])

    # --- ending

    def value(self) -> Any:
        """Return the method's value after the invocation has ended."""
        end = self.end
        if isinstance(end, Suspend) and self.place is not None:
            return self._suspended_value()
        if not isinstance(end, Finish):
            fact = "a tool needs approval or a later result, which this call cannot wait for"
            raise IllegalConfigurationError([Problem(self.plan.where, fact, "let the tool return a result")])
        if self.plan.output.shape is not Shape.RESULT or isinstance(end.value, Result):  # that of a fallback
            return end.value
        return self.state.result(end.value, end.finish_reason)

    async def suspend(self) -> None:
        """Store the run, or note for the outer invocation that this one is suspended."""
        if self.place is not None:
            await self.place.session.suspend(self)

    def _suspended_value(self) -> Any:
        """Return a `Result` with the pending calls, or raise the error that has them."""
        assert self.place is not None
        session = self.place.session
        if self.place.path:
            raise ToolSuspension({"kind": "service"})
        if self.plan.output.shape is not Shape.RESULT and not session.wants_result:
            raise RunSuspendedError(session.id, session.pending)
        return self.state.result_while_suspended(session.pending, session.id)

    def note(self) -> None:
        """Add the invocation to the records of enclosing `invocation_record` blocks, also after an error."""
        if self.has_begun:
            for record in _records.get():
                record.add(self.state)


def _last_user_message(messages: Sequence[Message]) -> UserMessage:
    """Return the last user message; an empty one if there is none."""
    return next((each for each in reversed(messages) if isinstance(each, UserMessage)), UserMessage(()))


def is_part_of_run() -> bool:
    """Return True in a tool call of a run: a service that is the tool becomes a part of the run."""
    outer = current_invocation.get()
    return outer is not None and outer.place is not None and not outer.place.is_entered


def _place_of(
    plan: MethodPlan, host: ServiceHost, outer: InvocationContext | None, arguments: Mapping[str, Any]
) -> PlaceInRun | None:
    """Return the place of a service that runs as the tool of `outer`, or of a new run; None if it needs none."""
    if outer is not None and outer.place is not None:
        around = cast("PlaceInRun", outer.place)  # the context does not know what services need from it
        if (place := around.enter()) is not None:
            return place
    return _place_in_new_run(plan, host, arguments) if plan.may_suspend or plan.has_inner_provider else None


def _place_in_new_run(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any]) -> PlaceInRun:
    return host.new_run(None if plan.run_id_parameter is None else arguments[plan.run_id_parameter])


async def call_with_beans(function: Callable[..., Any], where: str, scope: ActiveScope, runner: Runner) -> Any:
    """Call a function with its `Inject[…]` parameters, where a tool would run. See `current_bean_caller`.

    Raises `IllegalConfigurationError` for parameters that cannot be injected.
    """
    injected, problems = read_injected(function, where)
    if problems:
        raise IllegalConfigurationError(problems)
    beans = await _beans_for(injected, scope)
    kind = COROUTINE if is_async(function) else BLOCKING
    value = await runner.run(kind, lambda: function(**beans), where)
    return await value if inspect.isawaitable(value) else value


async def _beans_for(injected: Iterable[InjectedParameter], scope: ActiveScope) -> dict[str, Any]:
    beans: dict[str, Any] = {}
    for each in injected:
        if not each.optional:
            beans[each.name] = await scope.aget(each.wanted)
        elif (bean := await scope.find(each.wanted)) is not None:
            beans[each.name] = bean
    return beans


class LimitedCall(Protocol):
    """A call that a limit can end while one of its steps runs. `refused` is the error of that limit."""

    refused: UsageLimitExceededError | None

    def during(self, step: StepOfTask | None, /) -> None:
        """Set the step that runs now."""
        ...


class StepOfTask(AbstractAsyncContextManager[None]):
    """A step of a limited call in a task. Like a timeout, a limit cancels the task and becomes the call's own error."""

    def __init__(self, invocation: LimitedCall) -> None:
        self._invocation = invocation
        self._loop = asyncio.get_running_loop()
        self._cancellations = CancellationsHere()
        assert self._cancellations.task is not None, "an invocation runs in a task"
        self._task: asyncio.Task[Any] = self._cancellations.task
        self._context = copy_context()  # in which it cancels: for the code in between this comes from outside
        self._is_interrupted = self._has_ended = False

    def interrupt(self) -> None:
        """Cancel the task, from any thread."""
        call_on(self._loop, self._cancel)

    def _cancel(self) -> None:
        if not (self._has_ended or self._is_interrupted):
            self._is_interrupted = True
            self._context.run(self._task.cancel)

    async def __aenter__(self) -> None:
        if self._invocation.refused is not None:
            raise self._invocation.refused
        self._invocation.during(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended = True
        self._invocation.during(None)
        refused = self._invocation.refused
        if refused is None:
            return
        if self._is_interrupted:
            if kind is None or not issubclass(kind, asyncio.CancelledError):
                with suppress(asyncio.CancelledError):  # other code has swallowed it, or it is still to come
                    await asyncio.sleep(0)
            if not self._cancellations.take_back() and kind is asyncio.CancelledError:
                return  # other code cancelled the task as well
        if error is not refused and not isinstance(error, GeneratorExit):
            raise refused from None


# --- records


@dataclass(slots=True)
class InvocationRecord:
    """The messages, tool executions and token usage of all invocations in a block, in the order in which they ended.

    It includes services called as tools, and invocations that failed. `token_usage` is the sum; None if no reply
    contained a usage.
    """

    messages: list[Message] = field(default_factory=list)
    tool_executions: list[ToolExecution] = field(default_factory=list)
    token_usage: TokenUsage | None = None

    def add(self, state: State) -> None:
        """Add the state of an ended invocation."""
        self.messages += state.all_messages
        self.tool_executions += state.all_executions
        if state.token_usage is not None:
            usage = self.token_usage
            self.token_usage = state.token_usage if usage is None else usage + state.token_usage


_records: ContextVar[tuple[InvocationRecord, ...]] = ContextVar("toolbox.records", default=())


@contextmanager
def invocation_record() -> Iterator[InvocationRecord]:
    """Record all invocations that start inside the block, also those that fail.

        with invocation_record() as record:
            assistant.chat("Hello")
        print(record.token_usage, record.tool_executions)

    Yields an `InvocationRecord`, which can also be read after the block.
    """
    record = InvocationRecord()
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)
