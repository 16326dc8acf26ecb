"""The FastAPI integration of toolbox: beans in endpoints, a scope per request, streams to clients."""

from __future__ import annotations

try:
    import fastapi as _  # noqa: F401 - raises if FastAPI is missing
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox_fastapi needs FastAPI; install it with: pip install 'toolbox-di[fastapi]'", name=_error.name
    ) from None

from toolbox.parameters import Inject

from .application import install
from .dev_ui.access import DevUi
from .endpoints import InjectRoute
from .exchanges import ClientDisconnectedError
from .health_checks import health_router
from .mcp_endpoint import mount_mcp
from .run_endpoints import runs_router
from .streaming import StreamEnded, StreamFailed, send_stream, sse

__all__ = [
    "ClientDisconnectedError",
    "DevUi",
    "Inject",
    "InjectRoute",
    "StreamEnded",
    "StreamFailed",
    "health_router",
    "install",
    "mount_mcp",
    "runs_router",
    "send_stream",
    "sse",
]
