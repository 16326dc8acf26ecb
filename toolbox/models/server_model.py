"""What the models of all providers share: settings, connections, and errors without secrets.

A provider adds a settings class, a wire, and the requests of one reply. Not here: the transport (`transport`), the
providers (`openai`, `anthropic`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from ..chat import ChatModel, ChatRequest, ChatResponse, StreamEvent
from ..errors import IllegalConfigurationError, ModelError, Problem
from .server_errors import secrets_in
from .server_settings import ServerSettings
from .wire_encoding import ToolNames

if TYPE_CHECKING:
    from .transport import ClientPackage


def names_of(given: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a setting, which may be a single one."""
    return (given,) if isinstance(given, str) else tuple(given)


def added_tools(model: Mapping[str, Any], request: Mapping[str, Any]) -> list[Any] | None:
    """Return the server-side tools of a model and of a request. None in the request removes the model's."""
    given = {**request, **(request.get("extra_body") or {})}
    if "tools" in given and given["tools"] is None:
        return None
    both = [*(model.get("tools") or ()), *(given.get("tools") or ())]
    return both or None


class ServerChatModel(ChatModel, ABC):
    """A model behind a server. A provider implements `_send` and `_send_stream`.

    Secrets are hidden in all errors of these two methods here, so that no provider can forget it.
    """

    def __init__(
        self, settings: ServerSettings, problems: Iterable[Problem], package: Callable[[], ClientPackage]
    ) -> None:
        from .transport import Transport  # loads the HTTP library, like the package

        if problems := list(problems):
            raise IllegalConfigurationError(problems)
        self.model = settings.model
        self.fallback, self.cooldown = names_of(settings.fallback), settings.cooldown
        self._parameters = settings.body_parameters()
        self._server: ServerSettings = settings  # its text shows no key; the key alone would be in vars()
        self._tool_names = ToolNames()
        self._transport = Transport(settings, package())

    def __repr__(self) -> str:
        address = self._server.address.partition("?")[0]  # the query may contain a key
        return f"{type(self).__name__}({self.model!r}, base_url={address!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {self!r}, which holds connections and a key; create a new model instead"
        )

    @property
    def key_function(self) -> Callable[..., Any] | None:
        """The function that returns the key, or None."""
        key = self._server.key
        return None if isinstance(key, str) else key

    @property
    def base_url(self) -> str:
        """The base URL of the server's API."""
        return self._server.address

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters that are sent with every request."""
        return MappingProxyType(self._parameters)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Send a request and return the whole reply. Raises `ModelError`."""
        with self._hide_secrets(request):
            return await self._send(request)

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Send a request and yield the reply as events; the last is `CompleteResponse`. Raises `ModelError`."""
        with self._hide_secrets(request):
            async with aclosing(self._send_stream(request)) as events:
                async for event in events:
                    yield event

    async def aclose(self) -> None:
        """Close the connections. The model can be used again with new connections."""
        await self._transport.aclose()

    @abstractmethod
    async def _send(self, request: ChatRequest) -> ChatResponse:
        """Send a request and return the whole reply. Raises `ModelError`."""

    @abstractmethod
    def _send_stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events of the reply; the last is `CompleteResponse`. Raises `ModelError`."""

    @contextmanager
    def _hide_secrets(self, request: ChatRequest | None = None) -> Iterator[None]:
        """Hide secrets in errors: those of the settings, and credentials in the parameters of a request."""
        try:
            yield
        except ModelError as error:
            given = [self._parameters, request.parameters] if request is not None else []
            self._transport.hide_secrets(error, secrets_in(given))
            raise
