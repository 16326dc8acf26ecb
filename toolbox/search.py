"""Tool search: the model first sees one search tool, and finds the other tools with it.

Includes the strategies `KeywordToolSearch` and `Bm25ToolSearch`. Not here: showing the found tools in the next request
(`services.offering`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, ClassVar, Protocol, cast

from .bean_references import DEFAULT_SCOPE_MARK
from .chat import ToolExecutionRequest, ToolSpecification
from .context import InvocationContext
from .di.decorators import Scope
from .errors import ToolArgumentsError
from .tools.codec import decode_request

__all__ = [
    "Bm25ToolSearch",
    "KeywordToolSearch",
    "ToolSearchRequest",
    "ToolSearchResult",
    "ToolSearchStrategy",
]

SEARCH_TOOL = "tool_search_tool"
"""The name of the search tool, if the strategy does not choose another one."""


# --- what a strategy is


@dataclass(frozen=True, slots=True)
class ToolSearchRequest:
    """One search: the model's call of the search tool, the tools that are not yet visible, and the invocation."""

    request: ToolExecutionRequest
    tools: Sequence[ToolSpecification]
    context: InvocationContext | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(self.tools))


@dataclass(frozen=True, slots=True)
class ToolSearchResult:
    """The names of the found tools, best first, and the text for the model; by default the text lists the names."""

    tool_names: Sequence[str]
    text: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_names", tuple(self.tool_names))


def _make_terms_schema(description: str) -> dict[str, Any]:
    terms = {"type": "array", "items": {"type": "string"}, "description": description}
    return {"type": "object", "properties": {"terms": terms}, "required": ["terms"]}


class ToolSearchStrategy(ABC):
    """Finds tools for the model: `@register_ai_service(tool_search=…)` takes a subclass or an instance.

        class ByTopic(ToolSearchStrategy):
            specification = ToolSpecification("find_tools", "Find the tools for a topic.", TOPIC_SCHEMA)

            async def search(self, request: ToolSearchRequest) -> ToolSearchResult: ...

    A subclass is a bean, application-scoped without a scope decorator. `specification` is the search tool that the
    model sees; by default it is `tool_search_tool` with a list of search `terms`. `search` is `def` or `async def`.
    Raise `ToolArgumentsError` if the model's arguments are invalid.
    """

    specification: ToolSpecification = ToolSpecification(
        SEARCH_TOOL,
        "Finds available tools by search terms",
        _make_terms_schema("A list of search terms used to find relevant tools"),
    )

    @abstractmethod
    def search(self, request: ToolSearchRequest) -> ToolSearchResult | Awaitable[ToolSearchResult]:
        """Return the tools that fit the request. Raises `ToolArgumentsError` for invalid arguments of the model."""


setattr(ToolSearchStrategy, DEFAULT_SCOPE_MARK, Scope.APPLICATION)


# --- search by terms


class _TermSearch(ToolSearchStrategy):
    """Reads the model's search terms, and returns the best tools."""

    _DESCRIPTION: ClassVar[str]
    _TERMS: ClassVar[str]

    def __init__(self, max_results: int = 8, *, tool_name: str = SEARCH_TOOL, description: str | None = None):
        """Return at most `max_results` tools for a search. `tool_name` and `description` are those of the search tool.

        Raises `ValueError` if `max_results` is not an integer of 1 or more.
        """
        if isinstance(max_results, bool) or not isinstance(max_results, int):
            raise ValueError(f"invalid max_results={max_results!r}; use an integer of 1 or more")
        if max_results < 1:
            raise ValueError(f"invalid max_results={max_results}; use 1 or more")
        self.max_results = max_results
        self.specification = ToolSpecification(
            tool_name, description or self._DESCRIPTION, _make_terms_schema(self._TERMS)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_results={self.max_results})"

    def terms_of(self, request: ToolExecutionRequest) -> tuple[str, ...]:
        """Return the search terms of a call. Raises `ToolArgumentsError`."""
        arguments = decode_request(request, self.specification.parameters)
        terms = arguments.get("terms")
        if terms is None:
            raise ToolArgumentsError(request, [("terms", "missing; pass a list of search terms")])
        if not isinstance(terms, list):
            raise ToolArgumentsError(request, [("terms", "must be a list of search terms")])
        return tuple(str(each) for each in terms[:MOST_TERMS] if each is not None)


MOST_TERMS = 100
"""Further search terms of a call are ignored."""

_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def words_of(text: str) -> list[str]:
    """Return the words of a text or name in lower case; `getWeather` and `get_weather` have two."""
    return [word.casefold() for part in _WORD.findall(text) for word in _CAMEL.split(part)]


# Words that questions contain and that say nothing about a tool.
_STOP_WORDS = frozenset(
    words_of(
        "a about all an and any are as at be been by can could did do does for from had has have how i in into is it "
        "its me my of on or our please shall should so some than that the their them then there these they this those "
        "to up us was we were what when where which who whom whose why will with would you your"
    )
)


def _choose_meaningful(words: Iterable[str]) -> list[str]:
    """Return the words without stop words and repetitions; all of them if nothing else is left."""
    found = list(dict.fromkeys(words))
    return [word for word in found if word not in _STOP_WORDS] or found


class KeywordToolSearch(_TermSearch):
    """Finds tools whose name or description contains the search terms, in any case.

    A word in the name of a tool counts 2 and a word in its description 1; the tools with the highest sum are found.
    Among equal tools, those come first whose words are rare, and then those that were listed first.
    """

    _DESCRIPTION = "Finds available tools whose name or description contains given search terms"
    _TERMS = "A list of search terms used to find relevant tools"

    def search(self, request: ToolSearchRequest) -> ToolSearchResult:
        words = _choose_meaningful(_split_terms(self.terms_of(request.request)))
        tools = request.tools
        scores = [self.score(tool, words) for tool in tools]
        found = [index for index, score in enumerate(scores) if score > 0]
        if len(found) > 1:
            texts = [" ".join(_lower_texts(tool)) for tool in tools]
            weights = {word: 1 / max(1, sum([word in text for text in texts])) for word in words}
            rarity = {index: sum(weight for word, weight in weights.items() if word in texts[index]) for index in found}
            found.sort(key=lambda index: (-scores[index], -rarity[index]))
        return ToolSearchResult([tools[index].name for index in found[: self.max_results]])

    def score(self, tool: ToolSpecification, terms: Sequence[str]) -> int:
        """Return the sum over all different words: 2 if the name contains it, plus 1 if the description does."""
        name, description = _lower_texts(tool)
        total = 0
        for word in _split_terms(terms):
            if word in name:
                total += 2
            if word in description:
                total += 1
        return total


_PUNCTUATION = ".,;:!?()[]{}\"'`"


def _split_terms(terms: Sequence[str]) -> tuple[str, ...]:
    words = (word.strip(_PUNCTUATION) for term in terms for word in term.casefold().split())
    return tuple(dict.fromkeys(word for word in words if word))


def _lower_texts(tool: ToolSpecification) -> tuple[str, str]:
    """Return the name and the description of a tool in lower case."""
    return tool.name.casefold(), (tool.description or "").casefold()


# --- BM25


class Bm25ToolSearch(_TermSearch):
    """Finds tools by BM25 over names, descriptions and parameters: rare words count more, long texts less.

    Needs the extra `search` (`pip install "toolbox-di[search]"`); raises `ImportError` without it.
    """

    _DESCRIPTION = "Finds available tools by the words of their names, descriptions and parameters"
    _TERMS = "Words that describe the task or the tool"

    def __init__(self, max_results: int = 8, *, tool_name: str = SEARCH_TOOL, description: str | None = None):
        """Return at most `max_results` tools for a search. `tool_name` and `description` are those of the search tool.

        Raises `ValueError` if `max_results` is not an integer of 1 or more.
        """
        super().__init__(max_results, tool_name=tool_name, description=description)
        _make_ranking()  # raises if the package is missing
        self._indexes: OrderedDict[tuple[int, ...], _Index] = OrderedDict()
        self._lock = Lock()

    def search(self, request: ToolSearchRequest) -> ToolSearchResult:
        words = _choose_meaningful(word for term in self.terms_of(request.request) for word in words_of(term))
        tools = request.tools
        if not tools or not words:
            return ToolSearchResult(())
        scores = self._find_index(tools).scores([_stem_word(word) for word in words], tools)
        best = sorted((index for index in range(len(tools)) if scores[index] > 0), key=lambda index: -scores[index])
        return ToolSearchResult([tools[index].name for index in best[: self.max_results]])

    def _find_index(self, tools: Sequence[ToolSpecification]) -> _Index:
        """Return an index that contains these tools: that of an earlier search if there is one."""
        wanted = {id(tool) for tool in tools}
        with self._lock:
            for key, index in self._indexes.items():
                if wanted <= index.positions.keys():
                    self._indexes.move_to_end(key)
                    return index
            made = self._indexes[tuple(sorted(wanted))] = _Index(tools)
            if len(self._indexes) > _KEPT_INDEXES:
                self._indexes.popitem(last=False)
            return made


_KEPT_INDEXES = 16


class _Index:
    """A BM25 index of tools. It keeps the tools, so that their ids stay theirs."""

    def __init__(self, tools: Sequence[ToolSpecification]) -> None:
        self._tools = tools
        self.positions = {id(tool): position for position, tool in enumerate(tools)}
        self._index = _make_ranking()
        self._index.index([list(_collect_words(tool)) for tool in tools], show_progress=False)

    def scores(self, words: Sequence[str], tools: Sequence[ToolSpecification]) -> list[float]:
        """Return the score of each of the tools."""
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return [0.0] * len(tools)
        scores = self._index.get_scores(known)
        return [float(scores[self.positions[id(tool)]]) for tool in tools]


MOST_WORDS = 200
"""Further words of a description do not count."""


def _collect_words(tool: ToolSpecification) -> Iterator[str]:
    """Yield the words of a tool, without their endings. The name counts more than the rest.

    Each word of a description counts once: otherwise a tool that repeats the words of many questions is found first,
    and hides the right one.
    """
    yield from map(_stem_word, words_of(tool.name) * 3)
    yield from _split_description(tool.description)
    yield from _split_schema(tool.parameters, 0)


def _split_description(text: object) -> Iterable[str]:
    """Return each of the first words of a description once, without its ending."""
    return dict.fromkeys(map(_stem_word, words_of(str(text or ""))[:MOST_WORDS]))


def _split_schema(schema: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > 3:
        return
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, dict) else ():
        yield from map(_stem_word, words_of(str(name)))
        if isinstance(inner, dict):
            yield from _split_description(inner.get("description"))
            yield from _split_schema(inner, depth + 1)


@lru_cache(maxsize=10_000)
def _stem_word(word: str) -> str:
    """Return a word without the ending of its plural or verb form, so that `issues` finds `issue`."""
    for ending, short in (("ies", "y"), ("sses", "ss"), ("ing", ""), ("ed", ""), ("es", "e"), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word[: -len(ending)] + short
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


class _Ranking(Protocol):
    """The parts of `bm25s.BM25` that are used here."""

    vocab_dict: dict[str, int]

    def index(self, corpus: list[list[str]], *, show_progress: bool) -> None: ...
    def get_scores(self, query_tokens_single: list[str]) -> Sequence[float]: ...


def _make_ranking() -> _Ranking:
    try:
        from bm25s import BM25  # type: ignore[import-untyped]  # it has no type hints
    except ImportError as error:
        raise ImportError('Bm25ToolSearch needs the package bm25s: pip install "toolbox-di[search]"') from error
    made: Any = BM25()
    return cast("_Ranking", made)
