"""FastAPI and a toolbox container in one application: beans in endpoints, a scope per request, streams to clients."""

from .application import install
from .dev_ui.access import DevUi
from .endpoints import Inject, InjectRoute
from .exchanges import ClientDisconnectedError
from .mcp_endpoint import mount_mcp
from .streaming import send_stream, sse

__all__ = ["ClientDisconnectedError", "DevUi", "Inject", "InjectRoute", "install", "mount_mcp", "send_stream", "sse"]
