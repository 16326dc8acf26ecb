"""Error codes of JSON-RPC and of the SDK's client.

Not here: the errors with these codes (`toolbox.errors`).
"""

from __future__ import annotations

METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
"""The arguments of a call are invalid."""
INTERNAL_ERROR = -32603

# Codes of the SDK's client for missing answers; servers use the same numbers for their own errors.
CONNECTION_CLOSED = -32000
REQUEST_TIMEOUT = -32001
