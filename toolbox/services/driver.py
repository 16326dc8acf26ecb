"""Performs the effects of the tool loop: asks the model, runs the tools, keeps the conversation.

One asynchronous generator does it for all kinds of method; who iterates it decides the rest (`implementation`: to the
end; `streams`: step by step). Not here: what a caller gets of it (`outcomes`), what follows from what (`loop`), a
single tool call (`tools.pipeline`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..chat import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    IntermediateResponse,
    Message,
    ServiceEvent,
    ToolSpecification,
    UserMessage,
)
from ..chat_streams import answer_stream, no_response, response_of
from ..context import (
    InvocationContext,
    current_attributes,
    current_invocation,
    current_limit,
)
from ..errors import InvocationTimeoutError
from ..execution import CallerRunner, LoopRunner
from ..tools.pipeline import ToolEnvironment
from .host import ServiceHost
from .loop import (
    CallModel,
    Effect,
    Fail,
    Finish,
    ModelReplied,
    Rules,
    RunTools,
    State,
    ToolsRan,
    advance,
    begin,
    may_run,
)
from .memory import Caller, ChatMemoryKey, Window, caller_here
from .messages import system_message_of, user_message_of
from .observation import Observation
from .offering import offered
from .outputs import OutputMode, Result, Shape
from .plans import MethodPlan, Toolset, added_tools
from .records import note
from .rounds import Round


@dataclass(frozen=True, slots=True)
class Deadline:
    """When this invocation ends itself, in `time.monotonic()` seconds, and the limit it names then."""

    at: float
    limit: float


class Invocation:
    """One call of a service method. `state` and `finish` tell, after the events have ended, what came of it.

    `check`, set by who reads the events, raises what keeps a call from ending well.
    """

    def __init__(
        self,
        plan: MethodPlan,
        host: ServiceHost,
        arguments: Mapping[str, Any],
        *,
        streaming: bool = False,
        as_tool: bool = False,
    ) -> None:
        self.plan, self.host, self.arguments = plan, host, arguments
        self.streaming = streaming
        pool = plan.options.concurrent_tools
        runner = LoopRunner if plan.is_async else CallerRunner
        self.runner = runner(host.workers, pool if isinstance(pool, Executor) else None)
        self.state: State | None = None
        self._next: Effect  # what follows from the last event that the loop was told
        self.finish: Finish | None = None
        self.check: Callable[[Finish], None] | None = None
        self._round: Round | None = None
        memory_id = None if as_tool or plan.memory_parameter is None else arguments[plan.memory_parameter]
        remembers = plan.window is not None and memory_id is not None
        self._key = ChatMemoryKey.of(plan.service, memory_id) if remembers else None
        self.caller: Caller | None = caller_here() if remembers else None
        outer = current_invocation.get()
        self.deadline, seen = self._deadlines(outer)
        self.context = InvocationContext(
            service=plan.service,
            method=plan.name,
            memory_id=memory_id,
            user_message=user_message_of(plan, arguments),
            attributes=current_attributes(),
            deadline=seen,
            outer_invocation_id=outer.invocation_id if outer is not None else None,
        )
        self._added = added_tools()
        self._observation = Observation(host.listeners, self.context) if host.listeners is not None else None

    # --- what is known before anything runs

    def _deadlines(self, outer: InvocationContext | None) -> tuple[Deadline | None, float | None]:
        """The deadline this invocation enforces, and the one it knows of."""
        own = self.plan.call_limits.timeout
        enforced = Deadline(time.monotonic() + own, own) if own is not None else None
        around = current_limit.get()
        if around is not None and around.within is outer:
            limit = Deadline(around.deadline, around.seconds)
            enforced = limit if enforced is None or limit.at < enforced.at else enforced
        known = [
            at
            for at in (
                enforced.at if enforced is not None else None,
                around.deadline if around is not None else None,
                outer.deadline if outer is not None else None,
            )
            if at is not None
        ]
        return enforced, min(known, default=None)

    @property
    def remembers(self) -> bool:
        """Whether it belongs to a conversation that is kept."""
        return self._key is not None

    @property
    def label(self) -> str:
        """As logs name it."""
        return self.plan.where

    def timed_out(self) -> InvocationTimeoutError:
        """What the caller gets when the deadline has passed."""
        limit = self.deadline.limit if self.deadline is not None else 0.0
        return InvocationTimeoutError(self.plan.service.__name__, self.plan.name, limit)

    # --- the one course of a call

    async def events(self) -> AsyncGenerator[ServiceEvent, None]:
        """The call, from the first look into the conversation to the answer; what happens on the way is yielded."""
        observation = self._observation
        try:
            if observation is not None:
                observation.started()
            async with self._turn() as history:
                try:
                    model = self.host.model(self.plan.options.model)
                    toolset = await offered(self.plan, self._added, self.host, self.context, self.runner)
                    mode = self._mode(model)
                    if observation is not None:
                        model = observation.of(model)
                    rules = self.plan.rules(toolset, mode)
                    surroundings = self._surroundings(toolset)
                    self.state, effect = await self._begin(history, mode)
                    while isinstance(effect, (CallModel, RunTools)):
                        if isinstance(effect, CallModel) and not self.streaming:
                            await self._ask(model, rules, self._request(toolset, mode, effect))
                        else:
                            performed = (
                                self._follow(model, toolset, rules, surroundings, self._request(toolset, mode, effect))
                                if isinstance(effect, CallModel)
                                else self._run(toolset, rules, surroundings, effect)
                            )
                            async with aclosing(performed):
                                async for event in performed:
                                    yield event
                        effect = self._next
                    if isinstance(effect, Fail):
                        raise effect.error
                    if self.check is not None:
                        self.check(effect)
                    await self._remember(history)
                    self.finish = effect
                    if observation is not None:
                        observation.completed(effect.response, self.value(), self.state)
                    yield CompleteResponse(effect.response)
                finally:
                    if self._round is not None:
                        await self._round.cancel()
        except BaseException as error:
            self.context.cancellation.cancel()
            if observation is not None:
                late = self.deadline is not None and time.monotonic() >= self.deadline.at
                observation.failed(self.timed_out() if late and isinstance(error, asyncio.CancelledError) else error)
            raise
        finally:
            if self.state is not None:
                note(self._reached(self.state))

    def _reached(self, state: State) -> State:
        """The state, with what has come of a round that something ended half-way."""
        outcomes = self._round.outcomes if self._round is not None else ()
        if not outcomes:
            return state
        last = state.messages[-1]
        asked = isinstance(last, AiMessage) and last.has_tool_execution_requests  # else the reply was not complete
        return replace(
            state,
            executions=(*state.executions, *(each.execution for each in outcomes)),
            messages=(*state.messages, *(each.message for each in outcomes if asked)),
        )

    def _turn(self) -> AbstractAsyncContextManager[tuple[Message, ...]]:
        """The time in which the conversation is this call's alone; what is in it so far."""
        if self._key is None or self.plan.window is None:
            return nullcontext(())
        return self._turn_in(self._key, self.plan.window)

    @asynccontextmanager
    async def _turn_in(self, key: ChatMemoryKey, window: Window) -> AsyncIterator[tuple[Message, ...]]:
        memories = await self.host.memories()
        async with memories.turn(key, self):
            yield await memories.load(key, window)

    async def _remember(self, history: tuple[Message, ...]) -> None:
        if self._key is None or self.plan.window is None or self.state is None:
            return
        memories = await self.host.memories()
        kept = self.plan.window.newest((*history, *self.state.remembered))
        await memories.store.update_messages(self._key, kept)
        if self._observation is not None:
            self._observation.remembered(kept)

    async def _begin(self, history: tuple[Message, ...], mode: OutputMode) -> tuple[State, Effect]:
        told = [message for name in self.plan.history for message in self.arguments[name] or ()]
        user = self.context.user_message or UserMessage("")
        structure = self.plan.output.structure
        prompted = None
        if structure is not None and mode == "prompt":
            prompted = UserMessage([*user.contents, structure.instructions], user.name, user.attributes)
        system = await system_message_of(self.plan, self.arguments, self.host, self.context, self.runner)
        return begin(system, (*history, *told), user, prompted)

    def _mode(self, model: ChatModel) -> OutputMode:
        mode = self.plan.options.output_mode
        if mode is not None and not (mode == "tool" and self.plan.output.is_stream):
            return mode
        return "schema" if getattr(model, "supports_response_format", False) else "prompt"

    # --- tools

    def _surroundings(self, toolset: Toolset) -> ToolEnvironment:
        return ToolEnvironment(
            tools=toolset.by_name,
            context=self.context,
            scope=self.host.scope,
            runner=self.runner,
            failures=self.plan.failures.over(self.host.failures),
            max_result_chars=self.plan.call_limits.max_result_chars,
            listeners=self.host.listeners,
        )

    def _new_round(self, toolset: Toolset, surroundings: ToolEnvironment) -> Round:
        together = bool(self.plan.options.concurrent_tools)
        return Round(surroundings, together=together, at_once=self.host.max_concurrent_tools)

    # --- asking the model

    async def _ask(self, model: ChatModel, rules: Rules, request: ChatRequest) -> None:
        """Asks the model for its whole reply."""
        self._advance(rules, ModelReplied(response_of(model, await model.chat(request))))

    async def _follow(
        self,
        model: ChatModel,
        toolset: Toolset,
        rules: Rules,
        surroundings: ToolEnvironment,
        request: ChatRequest,
    ) -> AsyncGenerator[ServiceEvent, None]:
        """Asks the model and follows its reply, which may start tools before it is complete."""
        assert self.state is not None
        early = bool(self.plan.options.concurrent_tools) and may_run(rules, self.state)
        self._round = round_ = self._new_round(toolset, surroundings)
        response: ChatResponse | None = None
        async with aclosing(answer_stream(model, request)) as events:
            async for event in events:
                if isinstance(event, CompleteResponse):
                    response = response_of(model, event.response)
                    break
                if early and isinstance(event, CompleteToolCall):
                    round_.start(event.index, event.request)
                yield event
                if early:
                    for happened in round_.happened():
                        yield happened
                    round_.raise_failure()
        if response is None:
            raise no_response(model)
        self._advance(rules, ModelReplied(response))

    def _request(self, toolset: Toolset, mode: OutputMode, effect: CallModel) -> ChatRequest:
        options, structure = self.plan.options, self.plan.output.structure
        specifications: tuple[ToolSpecification, ...] = toolset.specifications
        choice = options.tool_choice
        if choice not in (None, "auto", "none") and not effect.first:
            choice = None
        if structure is not None and mode == "tool":
            specifications = self.plan.with_answer_tool(toolset)
            choice = choice or "required"
        parameters = dict(options.parameters)
        if options.temperature is not None:
            parameters["temperature"] = options.temperature
        return ChatRequest(
            messages=effect.messages,
            tool_specifications=specifications,
            response_format=structure.response_format if structure is not None and mode == "schema" else None,
            tool_choice=choice if specifications or parameters.get("tools") else None,
            parameters=parameters,
        )

    def _advance(self, rules: Rules, event: ModelReplied | ToolsRan) -> None:
        assert self.state is not None
        self.state, self._next = advance(rules, self.state, event)

    # --- running the tools

    async def _run(
        self, toolset: Toolset, rules: Rules, surroundings: ToolEnvironment, effect: RunTools
    ) -> AsyncGenerator[ServiceEvent, None]:
        requests = effect.requests
        immediate = all(each.name in rules.immediate for each in requests)
        intermediate = IntermediateResponse(effect.response)
        if not immediate:
            yield intermediate
        # In a stream the round may have begun before its reply was complete.
        self._round = round_ = self._round or self._new_round(toolset, surroundings)
        async with aclosing(round_.run(requests)) as events:
            async for event in events:
                yield event
        outcomes, self._round = round_.outcomes, None
        executions = [each.execution for each in outcomes]
        self._advance(rules, ToolsRan(effect.response, executions, [each.message for each in outcomes]))
        if immediate and not isinstance(self._next, Finish):
            yield intermediate

    # --- what the caller gets

    def value(self) -> Any:
        """The method's value, once the events have ended."""
        assert self.finish is not None
        assert self.state is not None
        value = self.finish.value
        if self.plan.output.shape is not Shape.RESULT:
            return value
        return Result(
            value, self.state.executions, self.state.token_usage, self.finish.finish_reason, self.state.remembered
        )
