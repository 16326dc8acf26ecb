"""Types of retrieval: checked by mypy and pyright, never run."""

from collections.abc import Sequence
from typing import Protocol, assert_type

from toolbox import Container, Result, Retrieved, register_ai_service
from toolbox.guardrails import OutputGuardrailRequest
from toolbox.retrieval import Passage, Query, Retriever, retrieves


class Asynchronous(Retriever):
    optional = True
    timeout = None

    async def retrieve(self, query: Query) -> list[Passage]:
        assert_type(query.text, str)
        return []


class Plain(Retriever):
    timeout = 2.5

    def retrieve(self, query: Query) -> Sequence[Passage] | None:
        return None


@register_ai_service(retrievers=[Asynchronous, Plain()], passages_prompt="Use:\n{passages}", passages_chars=1_000)
class Clerk(Protocol):
    async def answer(self, question: str) -> Result[str]: ...

    @retrieves(Plain)
    async def other(self, question: str) -> str: ...


async def sources(container: Container, request: OutputGuardrailRequest, event: Retrieved) -> None:
    clerk = container.get(Clerk)
    assert_type(clerk, Clerk)
    assert_type(await clerk.other("x"), str)
    assert_type((await clerk.answer("x")).sources, Sequence[Passage])
    assert_type(request.sources, tuple[Passage, ...])
    assert_type(event.passages, tuple[Passage, ...])
