"""One call of a service method: its arguments, where it runs, its limits, its messages, and the value it ends with.

Not here: finding its model and tools (`opening`), performing its effects (`driver`), what ends it from outside
(`interruptions`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeAlias, cast

from ..chat import (
    ChatRequestParameters,
    ChatResponse,
    Message,
    StreamEvent,
    TokenUsage,
    ToolExecutionRequest,
    UserMessage,
)
from ..context import InvocationContext, complete_context, current_attributes, current_invocation
from ..conversations.keys import ChatMemoryKey, Owner
from ..conversations.memories import Caller, caller_here
from ..conversations.views import Excerpt
from ..di.scopes import ConversationScope
from ..di.stored_beans import StoredBeans
from ..errors import (
    ConversationStoppedError,
    IllegalConfigurationError,
    McpConnectionError,
    Problem,
    RunIncompatibleError,
    RunSuspendedError,
)
from ..execution.runners import CallerRunner, LoopRunner
from ..frozen_copies import copy_with
from ..limits import Account, LaterLimits, Usage, UsageLimitExceededError, UsageLimits, current_account, narrowest
from ..tools.tool_calls import Tool, ToolEnvironment, ToolSuspension
from .call_messages import last_user_message
from .host_needs import ServiceHost
from .interruptions import Deadline, ModelCall, find_deadlines
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
    tool_calls_in,
)
from .outputs import Result, Shape
from .plans import MethodPlan
from .recording_needs import FindApprovals, PlaceInRun, StoredInvocation
from .state import ReachedLimit, State
from .teams import arguments_in_charge
from .tools_of_blocks import current_additional_tools
from .toolsets import Provider, Toolset

Perform: TypeAlias = Callable[
    [CallModel | RunTool, "Invocation"], Awaitable[ModelReplied | ToolFinished | ToolSuspended]
]
"""Performs one effect, a model request or a tool call, and returns its result."""


class Invocation(ModelCall):
    """One call of a service method.

    `state` is the current state, once it `has_begun`, and `end` is the last effect. `history` is the conversation so
    far; a layer may set `history` and `user_message` before the invocation begins. `message` is the user message, if it
    is not that of the arguments. With `caller_waits`, the thread of the caller must wait with
    `caller_runner().wait_for(…)`, which runs blocking tools.
    """

    model_name = ""
    """The name of the model; an empty text until it is found."""
    call_options: ChatRequestParameters | None = None
    """The options of this call, in addition to those of the method."""
    toolset: Toolset
    rules: Rules
    environment: ToolEnvironment
    state: State
    has_begun = False
    end: Effect | None = None
    perform: Perform
    """Performs an effect inside of the layers of the method."""
    put_piece: Callable[[StreamEvent], Awaitable[None]] | None = None
    """In a stream, passes on a piece of the model's reply, and returns when the next one is requested."""
    before_end: Callable[[Finish], None] | None = None
    """Called before the invocation ends with an answer; may raise."""
    before_suspension: Callable[[], Awaitable[None]] | None = None
    """Called before the write that suspends the run."""
    has_waiting_turn = False
    """True if its turn in the conversation waits: any other turn of it replaces that one."""
    history: tuple[Message, ...] = ()
    excerpt: Excerpt | None = None
    """What was loaded of the conversation, with the notes to store with the turn."""
    summary_usage: TokenUsage | None = None
    """The tokens of the summary that was made before the first request."""
    passages = ""
    """What retrievers have found for the user message, as text for each request."""
    asks_again = False
    """True in a run that continues, until its retrievers are asked again."""
    added: Sequence[Tool] = ()
    """Tools that enclosing blocks add to this call."""
    added_by = ""
    """The place that adds tools to this call; see `tools_added`."""
    dynamic_providers: tuple[Provider, ...] = ()
    """Tool providers that are asked before each model request."""
    unreachable: tuple[McpConnectionError, ...] = ()
    """The servers whose tools are missing."""
    is_input_checked = False
    """True if the input guardrails have judged the user message: in this call, or before the run was stored."""
    input_checked_by: str | None = None
    """The method that was in charge then; None without hand-overs."""
    has_other_message = False
    """True if an input guardrail has replaced the user message."""
    find_approvals: FindApprovals | None = None
    memory_key: ChatMemoryKey | None = None
    """The conversation of the call, if it has one that is kept."""
    caller: Caller | None = None
    """The task or thread that waits for a call in a conversation; None for a stream without a reader."""
    owner: Owner | None = None
    """The owner of the conversation, if its first turn is that of this call."""
    is_ending = False
    """True when the last effect has ended, and its turn is written: nobody can stop the call any more."""
    is_admitted = False
    """True if the roles of the caller were checked when the call was made."""
    beans: StoredBeans | None = None
    """The beans of its conversation, if it has one and the program has such beans."""
    joined: ConversationScope | None = None
    """The scope of a block that holds the conversation, and whose beans the call shares."""
    entry: MethodPlan
    """The plan of the method that was called; `plan` is that of the method in charge, the same without a hand-over."""
    arguments_in_charge: Mapping[str, Any]
    """The arguments of the method in charge, by name."""
    limits_of_entry: UsageLimits | None = None
    stored_charge: str | None = None
    """The method in charge that the conversation had stored."""
    leaves_charge = False
    """True if that one is not in reach of the method that was called, which then answers and changes nothing."""

    def __init__(
        self,
        plan: MethodPlan,
        host: ServiceHost,
        arguments: Mapping[str, Any],
        *,
        as_tool: bool = False,
        caller_waits: bool = False,
        place: PlaceInRun | None = None,
        message: UserMessage | None = None,
    ) -> None:
        outer = current_invocation.get()
        if place is None and (as_tool or plan.may_suspend or plan.has_inner_provider):
            place = _find_place(plan, host, outer if as_tool else None, arguments)
        restored = None
        if place is not None:
            plan, restored = plan.in_run, place.restored()
        self.plan, self.host, self.arguments, self.place = plan, host, arguments, place
        self.entry, self.arguments_in_charge = plan, arguments
        self.where = plan.where
        self.stored, self.stored_state = restored, None if restored is None else restored.state
        self.said: list[str] = []  # the text of the current reply that was sent to the reader of a stream
        self.undone: dict[int, bool] = {}  # by position of the execution; False if undoing it failed
        self.together = bool(plan.options.concurrent_tools)
        self.yields_suspension = plan.output.shape is Shape.EVENT_STREAM
        self.runner = self._make_runner(caller_waits)
        memory_id = None
        if plan.memory_parameter is not None and not as_tool:
            memory_id = arguments[plan.memory_parameter]
            self.memory_key = plan.find_conversation(memory_id)
            self.caller = None if self.memory_key is None else caller_here()
        if restored is not None:
            self.user_message = last_user_message((*restored.state.history, *restored.state.messages[:1]))
        else:
            self.user_message = plan.messages.make_user_message(arguments) if message is None else message
        # A stored invocation has the rest of its time.
        left = plan.call_limits.timeout if restored is None else restored.remaining
        self.deadline, earliest = self._find_deadlines(left, outer)
        self.context = InvocationContext(
            service=plan.service,
            method=plan.name,
            memory_id=memory_id,
            user_message=self.user_message,
            attributes=current_attributes.get(),
            deadline=earliest,
            outer_invocation_id=outer.invocation_id if outer is not None else None,
            entry=plan.where,
        )
        if restored is not None:
            self.context.notes.update(restored.notes)
        added = current_additional_tools.get()
        if added is not None and added[1] is outer:
            self.added, self.added_by = added[0], added[2]
        if place is not None or plan.options.limits is not None or current_account.get() is not None or plan.team:
            self.account = self._open_account(restored)
        if restored is not None and (method := restored.state.in_charge) is not None:
            self.put_in_charge(self.find_stored_member(method), restored.state.counted_from or Usage())

    def _make_runner(self, caller_waits: bool) -> LoopRunner:
        """Return the runner of the tools: with the thread of the caller, if it waits and serves their calls."""
        pool = self.plan.options.concurrent_tools
        kind = CallerRunner if caller_waits else LoopRunner
        return kind(self.host.workers, pool if isinstance(pool, Executor) else None)

    def _open_account(self, restored: StoredInvocation | None) -> Account | None:
        """Return the account that counts the usage, if this invocation or one around it has limits."""
        around, limits = current_account.get(), self.plan.options.limits
        if self.place is not None:
            # They become one, so a refusal does not tell whether the limit was the invocation's own.
            limits = narrowest(limits, self.place.limits)
        if limits is None and any(each.team_limits is not None for each in self.plan.team.values()):
            limits = UsageLimits()  # they count from the hand-over on
        if around is None and limits is None:
            return None
        account = Account(limits, around, self)
        self.limits_of_entry = limits
        if restored is not None and restored.usage is not None and account.limits is not None:
            account.usage = restored.usage
        return account

    # --- hand-over

    @property
    def answers_at_limit(self) -> bool:
        """True if the model is asked for its answer where a limit would end the call."""
        return self.account is not None and self.plan.options.on_limit == "answer"

    @property
    def checks_input(self) -> bool:
        """True if input guardrails judge the user message: of the method that was called, or of the one in charge."""
        return self.entry.layers.check_input is not None or self.plan.layers.check_input is not None

    @property
    def unchecked(self) -> list[MethodPlan]:
        """The plans whose input guardrails judge the user message before the first request."""
        plans = [] if self.is_input_checked else [self.entry]
        if self.plan is not self.entry and not (self.is_input_checked and self.input_checked_by == self.plan.where):
            plans.append(self.plan)
        return [each for each in plans if each.layers.check_input is not None]

    @property
    def added_tools(self) -> Sequence[Tool]:
        """The tools that enclosing blocks add: to the method that was called, not to one that takes over."""
        return self.added if self.plan is self.entry else ()

    def find_tool(self, name: str) -> Tool | None:
        """Return the tool of an earlier call: of the method in charge, or of one that was in charge before."""
        toolsets = (self.toolset, *(each.toolset for each in (self.entry, *self.entry.team.values())))
        return next((tool for each in toolsets if (tool := each.stored(name)) is not None), None)

    def find_member(self, method: str) -> MethodPlan | None:
        """Return the plan of a call that this method has taken over; None for one that the entry does not reach."""
        if method == self.entry.where:
            return self.entry
        found = self.entry.team.get(method)
        return found if found is None or self.place is None else found.in_run

    def find_stored_member(self, method: str) -> MethodPlan:
        """Return the same for the method in charge of a stored run. Raises `RunIncompatibleError` if it is gone."""
        if (found := self.find_member(method)) is not None:
            return found
        assert self.place is not None
        reason = f"this program has no {method}, to which {self.entry.where} had handed the call over"
        raise RunIncompatibleError(self.place.run_id, reason)

    def put_in_charge(self, plan: MethodPlan, counted_from: Usage | None = None) -> None:
        """Let the method of this plan shape requests, replies and tools from now on: the switch of a hand-over.

        Its own limits count from `counted_from` on, by default from what is used now.
        """
        self.plan = plan
        self._read_arguments()
        # A new object: events that listeners have kept stay those of the method before.
        self.context = copy_with(self.context, service=plan.service, method=plan.name)
        account = self.account
        if account is not None and account.limits is not None:
            used = account.usage if counted_from is None else counted_from
            account.count_later(LaterLimits(plan.team_limits or UsageLimits(), used, self.limits_of_entry))

    def _read_arguments(self) -> None:
        """Find the arguments of the method in charge; the user message is one of them."""
        if self.plan is self.entry:
            self.arguments_in_charge = self.arguments
        else:
            given = arguments_in_charge(self.entry, self.plan, self.arguments, self.user_message)
            self.arguments_in_charge = given

    def restart_clock(self) -> Invocation:
        """Let the time of `timeout=` begin now: at the first step of a stream that was made before. Return `self`."""
        self.deadline, earliest = self._find_deadlines(self.plan.call_limits.timeout, current_invocation.get())
        complete_context(self.context, deadline=earliest)
        return self

    def _find_deadlines(
        self, left: float | None, outer: InvocationContext | None
    ) -> tuple[Deadline | None, float | None]:
        """Return the deadline of this invocation, which has so many seconds left, and the earliest of all around it."""
        timeout = self.plan.call_limits.timeout
        return find_deadlines(None if left is None else Deadline.after(left, timeout or left), outer)

    def move_deadline(self, seconds: float) -> None:
        """Let the invocation end later. Called before it begins."""
        assert self.deadline is not None
        self.deadline = replace(self.deadline, at=self.deadline.at + seconds)
        complete_context(self.context, deadline=self.deadline.at)

    def caller_runner(self) -> CallerRunner:
        """Return the runner that uses the thread of the caller, which waits for this invocation."""
        assert isinstance(self.runner, CallerRunner)
        self.runner.has_deadline = self.deadline is not None
        return self.runner

    def become_run(self) -> None:
        """Continue as a new run, because a tool that was added may suspend the call."""
        self.place = _find_place_in_new_run(self.entry, self.host, self.arguments)
        if self.beans is not None:
            self.place.run.beans = self.beans
        if self.find_approvals is not None:
            self.place.run.find_approvals = self.find_approvals
        self.plan, self.entry = self.plan.in_run, self.entry.in_run

    def use_beans(self, beans: StoredBeans) -> None:
        """Use the beans of the conversation, which are stored with the turn. A run records how they change."""
        self.beans = beans
        if self.place is not None:
            self.place.run.beans = beans

    def use_approvals(self, find: FindApprovals) -> None:
        """Use the approvals that the conversation remembers, as a run or as soon as this is one."""
        self.find_approvals = find
        if self.place is not None:
            self.place.run.find_approvals = find

    # --- what layers and the driver ask

    def tool_calls_in(self, response: ChatResponse) -> Sequence[ToolExecutionRequest]:
        """Return the tool calls in a reply, without the call that is the answer itself."""
        if self.state.stopped is not None:
            return ()  # those of a last reply do not run
        return tool_calls_in(self.rules, self.state.mode, response.ai_message)

    def count_tool_calls(self, response: ChatResponse) -> int:
        """Return the number of tool calls in a reply."""
        return len(self.tool_calls_in(response))

    @property
    def is_recorded(self) -> bool:
        """True if the call is part of a run that is stored already."""
        return self.place is not None and self.place.run.is_stored

    @property
    def starts_early(self) -> bool:
        """True if tools may start before a reply is complete. A limit may still refuse the whole reply."""
        return self.together and self.account is None and not self.is_recorded

    @property
    def is_resumed(self) -> bool:
        """True if the invocation continues from a stored state."""
        return self.stored_state is not None

    # --- stopping

    @property
    def can_be_stopped(self) -> bool:
        """True for a call in a conversation."""
        return self.memory_key is not None

    def stop(self, by: str | None) -> None:
        """End the call because its conversation is stopped; a run ends as cancelled. Called on the call's own loop."""
        if self.is_ending:
            return
        if self.place is not None and self.place.run.is_stored:
            self.place.run.stop(by)
        else:
            self.stop_with(ConversationStoppedError(by))

    @property
    def was_stopped(self) -> bool:
        """True if the call ends because its conversation was stopped, or its run cancelled."""
        return self.stopped is not None or (self.place is not None and self.place.run.is_cancelled)

    # --- messages

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The messages of this call so far."""
        if self.has_begun:
            return self.state.all_messages
        return () if self.plan.messages.continues_history else (self.user_message,)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages before the user message: those of the conversation, then those of parameters."""
        history = (*self.history, *self.plan.messages.read_history(self.arguments))
        return history[:-1] if self.plan.messages.continues_history and self.ends_with_user_message else history

    @property
    def ends_with_user_message(self) -> bool:
        """True if the first request ends with the user message; else a history that ends with results of tools."""
        if not self.plan.messages.continues_history:
            return True
        return isinstance(self.plan.messages.read_history(self.arguments)[-1], UserMessage)

    def replace_user_message(self, message: UserMessage) -> None:
        """Replace the user message before anything is sent. The context has the new one from now on."""
        self.user_message, self.has_other_message = message, True
        self._read_arguments()
        complete_context(self.context, user_message=message)

    # --- limits

    def answers_at(self, limit: str, allowed: object) -> bool:
        """Return True if the model is asked for its answer at this limit: it is the service's own, with this value.

        That of the method in charge is one too; `allowed` has what was used before the hand-over.
        """
        options, later = self.plan.options, None if self.account is None else self.account.later
        own = [each for each in (options.limits, None if later is None else later.in_total) if each is not None]
        return options.on_limit == "answer" and any(allowed == getattr(each, limit, None) for each in own)

    def may_exceed(self, limit: str, allowed: object) -> bool:
        """Return True if the limit was reached, and only the answer is asked for."""
        return self.has_begun and self.state.stopped is not None and self.answers_at(limit, allowed)

    def reach(self, error: UsageLimitExceededError) -> ReachedLimit | None:
        """Return the limit for which the model is asked for its answer in place of an error; None if the call fails."""
        if error is not self.refused or self.state.stopped is not None:
            return None
        later, allowed = None if self.account is None else self.account.later, error.allowed
        if later is not None and later.binds(error.limit) and allowed == getattr(later.limits, error.limit):
            allowed = getattr(later.in_total, error.limit)
        if not self.answers_at(error.limit, allowed):
            return None
        self.refused = None
        return ReachedLimit.of(error)

    # --- ending

    def value(self) -> Any:
        """Return the method's value after the invocation has ended."""
        end = self.end
        if isinstance(end, Suspend) and self.place is not None:
            return self._suspended_value(self.place)
        if not isinstance(end, Finish):
            fact = "a tool needs approval or a later result, which this call cannot wait for"
            raise IllegalConfigurationError([Problem(self.plan.where, fact, "let the tool return a result")])
        if self.plan.output.shape is not Shape.RESULT or isinstance(end.value, Result):  # that of a fallback
            return end.value
        return self.state.result(end.value, end.finish_reason, self.plan.where)

    def _suspended_value(self, place: PlaceInRun) -> Any:
        """Return a `Result` with the pending calls, or raise the error that has them."""
        if place.path:
            raise ToolSuspension({"kind": "service"})
        # The execution of a stored run wants it as a `Result`, whatever the method returns.
        if self.plan.output.shape is not Shape.RESULT and not place.run.is_stored:
            raise RunSuspendedError(place.run_id, place.pending)
        return self.state.result_while_suspended(place.pending, place.run_id, self.plan.where)


# --- the place in a run


def is_part_of_run() -> bool:
    """Return True in a tool call of a run: a service that is the tool becomes a part of the run."""
    outer = current_invocation.get()
    return outer is not None and outer.place is not None and not outer.place.is_entered


def _find_place(
    plan: MethodPlan, host: ServiceHost, outer: InvocationContext | None, arguments: Mapping[str, Any]
) -> PlaceInRun | None:
    """Return the place of a service that runs as the tool of `outer`, or of a new run; None if it needs none."""
    if outer is not None and outer.place is not None:
        around = cast("PlaceInRun", outer.place)  # the context does not know what services need from it
        if (place := around.enter()) is not None:
            return place
    return _find_place_in_new_run(plan, host, arguments) if plan.may_suspend or plan.has_inner_provider else None


def _find_place_in_new_run(plan: MethodPlan, host: ServiceHost, arguments: Mapping[str, Any]) -> PlaceInRun:
    return host.new_run(None if plan.run_id_parameter is None else arguments[plan.run_id_parameter])
