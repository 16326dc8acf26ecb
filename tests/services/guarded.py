"""Guardrails and services that several tests of guardrails share."""

from typing import Any, Protocol

from pydantic import BaseModel

from toolbox import (
    AiMessage,
    Container,
    EventListener,
    GuardrailExecutedEvent,
    InvocationEvent,
    MemoryId,
    Result,
    TokenStream,
    application_scoped,
    register_ai_service,
    tool,
)
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    input_guardrails,
    output_guardrails,
)
from toolbox.testing import ScriptedChatModel

from .log import LOG


@application_scoped
class Events(EventListener):
    def __init__(self) -> None:
        self.guardrails: list[tuple[str, str]] = []
        self.all: list[GuardrailExecutedEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, GuardrailExecutedEvent):
            self.guardrails.append((event.guardrail.__name__, event.outcome))
            self.all.append(event)


class NoDigits(InputGuardrail):
    async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        LOG.append(("NoDigits", request.user_message.text))
        if any(each.isdigit() for each in request.user_message.text):
            return self.failure("digits")
        return self.success()


def started(model: ScriptedChatModel, *classes: type) -> Container:
    return Container(models={"default": model}).register(*classes)


def guarded(*guardrails: Any, **options: Any) -> Any:
    @register_ai_service(**options)
    @input_guardrails(*guardrails)
    class Guarded(Protocol):
        async def ask(self, text: str) -> str: ...
        def wait(self, text: str) -> str: ...

    return Guarded


class Polite(OutputGuardrail):
    """Judges by words in the answer."""

    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        LOG.append(request)
        for word in ("failure", "fatal", "retry"):
            if word in request.text:
                return getattr(self, word)(f"it says {word}")  # type: ignore[no-any-return]
        if "reprompt" in request.text:
            return self.reprompt("it says reprompt", "Say it differently.")
        return self.success_with(f"{request.text}!") if "loud" not in request.text else self.success()


class NoCompetitors(OutputGuardrail):
    async def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        return self.failure("a competitor") if "ACME" in request.text else self.success()


class Item(BaseModel):
    name: str


@tool
def price(item: str) -> str:
    return f"{item} costs 3"


@register_ai_service(tools=[price])
@output_guardrails(Polite)
class Shop(Protocol):
    @output_guardrails(NoCompetitors)
    async def ask(self, room: MemoryId[str], text: str) -> str: ...

    async def result(self, text: str) -> Result[str]: ...

    async def message(self, text: str) -> AiMessage: ...

    async def nothing(self, text: str) -> None: ...

    @output_guardrails(NoCompetitors, max_retries=4)
    async def patient(self, text: str) -> str: ...

    def events(self, text: str) -> TokenStream: ...
