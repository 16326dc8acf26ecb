"""FastAPI and a toolbox container in one application: beans in endpoints, a scope per request, streams to clients."""

from .application import install
from .endpoints import Inject, InjectRoute
from .exchanges import ClientDisconnectedError
from .streaming import send_stream, sse

__all__ = ["ClientDisconnectedError", "Inject", "InjectRoute", "install", "send_stream", "sse"]
