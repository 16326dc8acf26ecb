"""Decides which tools each model request offers: those of dynamic providers, and those that a search has found.

Two layers around model requests. Not here: the search strategies (`toolbox.search`), the tools that every request of an
invocation offers (`opening`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..bean_references import BeanReference
from ..chat import ChatRequest, Message, ToolExecutionRequest, ToolExecutionResult, ToolExecutionResultMessage
from ..context import InvocationContext
from ..errors import IllegalConfigurationError, Problem, ToolArgumentsError, ToolRetry
from ..execution.markers import is_async, marked_execution
from ..search import ToolSearchRequest, ToolSearchResult, ToolSearchStrategy
from ..tools.failures import return_to_model
from ..tools.function_calls import with_layers
from ..tools.marks import SearchBehavior
from ..tools.sources import AiServiceTool, read_tools
from ..tools.tool_calls import Tool
from .invocation import Invocation, Perform
from .loop import CallModel, RunTool, request_of
from .opening import add_dynamic_tools
from .plans import EffectLayer
from .toolsets import Toolset

FOUND_TOOLS = "found_tools"
"""The attribute of a search result with the names of the found tools. Stored conversations contain it."""


# --- dynamic providers


def refreshing(perform: Perform) -> Perform:
    """Ask the dynamic tool providers before each model request, and add their tools to the invocation."""

    async def refreshed(effect: CallModel | RunTool, invocation: Invocation) -> Any:
        if isinstance(effect, CallModel) and await add_dynamic_tools(invocation, effect.request.messages):
            effect = CallModel(request_of(invocation.rules, invocation.state))
        return await perform(effect, invocation)

    return refreshed


# --- search


def searching(strategy: BeanReference) -> EffectLayer:
    """Return the layer that offers the search tool, the found tools and those that are always visible."""

    def layer(perform: Perform) -> Perform:
        search: _Search | None = None

        async def searched(effect: CallModel | RunTool, invocation: Invocation) -> Any:
            nonlocal search
            if search is None:
                search = _Search(await strategy.find(invocation.host.scope), invocation)
                search.show([*invocation.state.history, *invocation.state.messages])
            if isinstance(effect, CallModel):
                effect = CallModel(search.narrowed(effect.request))
            return await perform(effect, invocation)

        return searched

    return layer


class _Search:
    """The search of one invocation: knows which tools are visible, and runs the search tool."""

    def __init__(self, strategy: ToolSearchStrategy, invocation: Invocation) -> None:
        self._strategy, self._invocation = strategy, invocation
        where = invocation.plan.where
        self._tool = self._search_tool(where)
        self.name = self._tool.name
        self._toolset: Toolset | None = None
        self._always: frozenset[str] = frozenset()

    def _search_tool(self, where: str) -> Tool:
        source = AiServiceTool(self._strategy.specification, self._search)
        [tool], problems = read_tools([source], where)
        if problems:
            raise IllegalConfigurationError(problems)
        search = self._strategy.search
        execution = marked_execution(search)
        return with_layers(replace(tool, execution=execution), self._invocation.plan.layers.tools)

    def narrowed(self, request: ChatRequest) -> ChatRequest:
        """Return the request with the visible tools only. Found tools are at the end, so that caches stay valid."""
        found = self.show(request.messages)
        toolset = self._invocation.toolset.by_name
        first = [each for each in request.tool_specifications if each.name in self._always or each.name not in toolset]
        last = [toolset[name].specification for name in found]
        return replace(request, tool_specifications=(*first, self._tool.specification, *last))

    def show(self, messages: Iterable[Message]) -> list[str]:
        """Make the tools visible that these messages found. Returns their names in the order in which they were found.

        Raises `IllegalConfigurationError` if the search tool has the name of another tool.
        """
        toolset = self._invocation.toolset
        if toolset is not self._toolset:
            self._toolset = toolset
            if self.name in toolset.by_name:
                fact = (
                    f"the search tool has the same name as the tool {toolset.by_name[self.name].where}: {self.name!r}"
                )
                fix = "rename one of them, for example with KeywordToolSearch(tool_name=…)"
                raise IllegalConfigurationError([Problem(self._invocation.plan.where, fact, fix)])
            forced = self._invocation.rules.tool_choice
            self._always = frozenset(
                tool.name
                for tool in toolset.tools
                if tool.search_behavior is SearchBehavior.ALWAYS_VISIBLE or tool.name == forced
            )
        found = [name for name in self._found_in(messages) if name in toolset.by_name and name not in self._always]
        environment = self._invocation.environment
        always = {tool.name: tool for tool in toolset.tools if tool.name in self._always}
        environment.tools = {**always, self.name: self._tool, **{name: toolset.by_name[name] for name in found}}
        environment.search_tool = self.name
        return found

    def _found_in(self, messages: Iterable[Message]) -> dict[str, None]:
        names: dict[str, None] = {}
        for each in messages:
            if isinstance(each, ToolExecutionResultMessage) and each.tool_name == self.name:
                found = each.attributes.get(FOUND_TOOLS)
                if isinstance(found, (list, tuple)):
                    names.update(dict.fromkeys(name for name in found if isinstance(name, str)))
        return names

    # --- one search

    def _search(self, request: ToolExecutionRequest, memory_id: object) -> Any:
        """Run the strategy. Returns a result, or an awaitable of it for an async strategy."""
        visible = self._invocation.environment.tools
        tools = [tool.specification for tool in self._invocation.toolset.tools if tool.name not in visible]
        search = ToolSearchRequest(request, tools, InvocationContext.current())
        if is_async(self._strategy.search):
            return self._await_found(search, self._strategy.search(search))
        try:
            answer = self._strategy.search(search)
        except ToolArgumentsError as error:
            raise self._readable(error, search) from error
        return self._await_found(search, answer) if inspect.isawaitable(answer) else self._result(search, answer)

    async def _await_found(self, search: ToolSearchRequest, answer: Any) -> ToolExecutionResult:
        try:
            return self._result(search, await answer)
        except ToolArgumentsError as error:
            raise self._readable(error, search) from error

    def _readable(self, error: ToolArgumentsError, search: ToolSearchRequest) -> Exception:
        """Return bad arguments of the search tool as an error that the model reads, whatever the handlers are."""
        if error.request != search.request:
            return error
        return ToolRetry(return_to_model(error, self._invocation.context))

    def _result(self, search: ToolSearchRequest, found: object) -> ToolExecutionResult:
        if not isinstance(found, ToolSearchResult):
            fact = f"{type(self._strategy).__name__}.search returned {type(found).__name__}"
            raise IllegalConfigurationError([Problem(self._invocation.plan.where, fact, "return a ToolSearchResult")])
        known = {each.name for each in search.tools}
        names = [name for name in dict.fromkeys(found.tool_names) if name in known]
        text = found.text if found.text is not None else f"Tools found: {', '.join(names)}"
        return ToolExecutionResult(text, found, attributes={FOUND_TOOLS: names})
