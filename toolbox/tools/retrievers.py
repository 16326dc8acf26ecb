"""Reads a retriever into a `Tool`, and runs it: for the user message of a call, or as a tool that the model calls.

It runs as every tool does: in a call scope, where its execution says, within its timeout. Not here: what a retriever is
(`retrieval`), which are asked and when (`services.retrieving`).
"""

from __future__ import annotations

import typing
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ..bean_references import BeanReference, definitions_of
from ..chat import Message, ToolExecutionRequest
from ..context import InvocationContext, current_invocation
from ..errors import Problem
from ..events import RetrievedEvent
from ..execution.markers import EXECUTION_MARK, execution_of, execution_problems
from ..frozen_copies import copy_with
from ..introspection import EMPTY, Unresolved, method_takes, read_signature, snake_case, type_name, unwrapped
from ..passages import EXPLANATION, NumberedPassages, Passage, passages_text
from ..retrieval import Query, Retriever
from ..security import access_to
from .codec import ArgumentDecoder
from .function_calls import run_function
from .marks import ToolMark
from .results import Encoded, awaited
from .specification import describe_tool, limit_problems, read_parameters
from .tool_calls import CallCancellation, Tool, ToolAttempt, ToolCall, ToolEnvironment

_FIX = "declare it `async def retrieve(self, query: Query) -> list[Passage]`"


@dataclass(frozen=True, slots=True)
class BoundRetriever:
    """A retriever that a method asks: `tool` runs it. Of an `optional` one, errors are logged only."""

    tool: Tool
    optional: bool


# --- reading


def is_retriever(source: object) -> bool:
    """Return True for a class or an instance of `Retriever`, also `Annotated` with a name."""
    kind = BeanReference.to(source).type
    return isinstance(kind, type) and issubclass(kind, Retriever)


def read_retrievers(named: Iterable[object], where: str) -> tuple[tuple[BoundRetriever, ...], list[Problem]]:
    """Return the retrievers that a service or a method lists, and the problems with them at the place `where`."""
    problems: list[Problem] = []
    read = [(BeanReference.to(each), read_search(each, where, problems)) for each in named]
    found = []
    for reference, tool in read:
        if tool is None:
            continue
        if tool.access is not None:
            fact = f"the roles of {tool.where} have no effect: no model calls it"
            problems.append(Problem(where, fact, "check the SecurityIdentity in retrieve, or list it in tools="))
        optional = getattr(reference.type if reference.bean is not None else reference.instance, "optional", False)
        if not isinstance(optional, bool):
            problems.append(Problem(where, f"invalid optional={optional!r} of {tool.where}", "use True or False"))
        specification = replace(tool.specification, name=tool.where)  # the name of its thread, and in errors
        found.append(BoundRetriever(replace(tool, specification=specification), optional is True))
    return tuple(found), problems


def read_search(source: object, where: str, problems: list[Problem]) -> Tool | None:
    """Return the tool that searches with a retriever, `search_handbook(query)`; None if it has problems."""
    reference, known = BeanReference.to(source), len(problems)
    kind: Any = reference.type
    retrieve = getattr(kind, "retrieve", None)
    if not isinstance(kind, type) or not callable(retrieve) or retrieve is Retriever.retrieve:
        problems.append(Problem(where, f"{type_name(kind)} has no method `retrieve`", _FIX))
        return None
    place = f"{type_name(kind)}.retrieve"
    if not method_takes(kind, "retrieve", 1):
        problems.append(Problem(place, "does not take one argument, the Query", _FIX))
    definitions = definitions_of(kind, "retrieve")
    function = getattr(definitions[0], "__func__", definitions[0]) if definitions else retrieve
    returns = read_signature(function).returns
    problems += _return_problems(place, function, returns)
    execution = execution_of(function, getattr(function, EXECUTION_MARK, None), returns)
    problems += execution_problems(place, function, execution)
    timeout = getattr(kind if reference.bean is not None else reference.instance, "timeout", Retriever.timeout)
    problems += limit_problems(place, timeout)
    mark = ToolMark(description=_describe(kind), timeout=timeout, on_unknown_outcome="retry")
    taken = read_parameters(_search, place, {}, problems, bound=False)
    described = describe_tool(f"search_{snake_case(kind)}", None, mark, taken, place, problems)
    if described is None or len(problems) > known:
        return None
    decoder = ArgumentDecoder(described.adapter, described.visible)
    return Tool(
        specification=described.specification,
        execution=execution,
        where=place,
        function=None if reference.bean is not None else reference.instance.retrieve,
        encode=_PassagesOf(place).check,
        run=search,
        decode=decoder.decode,
        complete=decoder.complete,
        validate=decoder.validate,
        visible=described.visible,
        positional=(("query", None),),
        bean=reference.bean,
        member="retrieve",
        returns=taken.returns,
        owner=kind,
        definitions=definitions,
        access=access_to(kind, definitions),
        **mark.options(),
    )


def _search(query: str) -> list[Passage]:
    """Declare what a model fills, and what it gets."""
    raise NotImplementedError


def _describe(kind: type[Any]) -> str:
    """Return the first paragraph of the docstring of the method or the class, or a text made of the class's name."""
    own = [base for base in kind.__mro__ if base not in Retriever.__mro__]
    documented = [*(vars(base).get("retrieve") for base in own), *own]
    texts = (getattr(each, "__doc__", None) for each in documented)
    text = next((each for each in texts if each and each.strip()), None)
    if text is None:
        return f"Search the {snake_case(kind).replace('_', ' ')} for passages about the query."
    return " ".join(text.strip().partition("\n\n")[0].split())


def _return_problems(place: str, function: Any, returns: Any) -> Iterator[Problem]:
    """Yield a problem if a return annotation says that `retrieve` returns something else than passages."""
    bare = unwrapped(awaited(returns)).type
    if returns is EMPTY or isinstance(bare, Unresolved) or bare in (EMPTY, Any, object, None, type(None)):
        return
    origin, items = typing.get_origin(bare) or bare, typing.get_args(bare)
    is_several = isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, (str, Mapping))
    kinds = [each for each in items if each is not Ellipsis]
    if is_several and all(each is Any or (isinstance(each, type) and issubclass(each, Passage)) for each in kinds):
        return
    kind = "an async generator" if isinstance(origin, type) and issubclass(origin, AsyncIterable) else type_name(bare)
    yield Problem(place, f"returns {kind}, not passages", _FIX)


# --- running


async def ask(
    tool: Tool, text: str, messages: Sequence[Message], context: InvocationContext, environment: ToolEnvironment
) -> Sequence[Passage]:
    """Return the passages of a retriever for a user message; to be run in its own context.

    Raises what the retriever raises, and `ToolTimeoutError`.
    """
    # Its timeout cancels the search, and not the call.
    asked = copy_with(context, cancellation=CallCancellation(context.cancellation))
    current_invocation.set(asked)
    call = ToolCall(tool, ToolExecutionRequest("", tool.name, "{}"), {"query": text}, asked, environment)
    return await _retrieve(call, Query(text, tuple(messages), asked))


async def search(call: ToolCall) -> Encoded:
    """Search for the words of a model: the step of a tool."""
    assert call.arguments is not None
    numbers = call.environment.passages or NumberedPassages()  # outside of services, no call has others
    found = await _retrieve(call, Query(call.arguments["query"], numbers.messages, call.context))
    numbered = numbers.add(found)
    text = f"{EXPLANATION}\n{passages_text(numbered)}" if numbered else "No passages were found."
    return Encoded(text, list(numbered.values()))


async def _retrieve(call: ToolCall, query: Query) -> Sequence[Passage]:
    began, listeners = perf_counter(), call.environment.listeners
    attempt = ToolAttempt(call.arguments, call.written_arguments())
    encoded = await run_function(call.with_arguments({"query": query}), attempt)
    found: Any = encoded.value
    if listeners is not None:
        assert call.tool.owner is not None
        listeners.tell(RetrievedEvent(call.context, call.tool.owner, query, found, perf_counter() - began))
    return found  # type: ignore[no-any-return]  # `_PassagesOf` has checked it


@dataclass(frozen=True, slots=True)
class _PassagesOf:
    """Checks what a retriever returns; `where` is its method."""

    where: str

    def check(self, value: Any) -> Encoded:
        """Return the passages as a tuple. Raises `TypeError` for anything else."""
        found = () if value is None else value
        if isinstance(found, (str, Mapping)) or not isinstance(found, Iterable):
            raise TypeError(f"{self.where} returned {type(value).__name__}; return a list of Passage, or None")
        passages = tuple(found)
        if (other := next((each for each in passages if not isinstance(each, Passage)), self)) is not self:
            raise TypeError(f"{self.where} returned a list with {type(other).__name__}; return a list of Passage")
        return Encoded("", passages)
