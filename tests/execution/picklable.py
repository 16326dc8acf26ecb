"""Functions that tests run in other processes, and their services.

Each process imports this module, so it imports little.
"""

import contextvars
import os
from typing import Protocol

from toolbox import InvocationContext, Progress, Result, TokenStream, register_ai_service, run_on
from toolbox.context import current_attributes

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def process_of(number: int) -> str:
    """Return the process id and the number."""
    return f"{os.getpid()} {number}"


def report_from_another_process(rows: int, progress: Progress) -> str:
    progress(rows)
    return "done"


@run_on("processes")
def attributes_there(context: InvocationContext) -> list[object]:
    assert InvocationContext.current() == context
    return [context.attributes, dict(current_attributes.get()), variable.get()]


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def events(self, text: str) -> TokenStream: ...


@register_ai_service(tools=attributes_there)
class Asking(Protocol):
    async def ask(self, question: str) -> Result[str]: ...
