"""REST clients: a Protocol or an ABC whose decorated methods send HTTP requests."""

from __future__ import annotations

from ..errors import RestArgumentError, RestClientError, RestDecodeError, RestTimeoutError
from .annotations import (
    Body,
    BodyField,
    Cookie,
    File,
    Form,
    Header,
    Path,
    Query,
    Upload,
    Url,
    client_cookie_param,
    client_exception_mapper,
    client_form_param,
    client_header_param,
    client_query_param,
    delete,
    get,
    head,
    patch,
    post,
    put,
    register_rest_client,
)
from .clients import create_rest_client
from .endpoint import KeySettings, propagate_headers, rest_settings
from .replies import Response, ServerSentEvent

__all__ = [
    "Body",
    "BodyField",
    "Cookie",
    "File",
    "Form",
    "Header",
    "KeySettings",
    "Path",
    "Query",
    "Response",
    "RestArgumentError",
    "RestClientError",
    "RestDecodeError",
    "RestTimeoutError",
    "ServerSentEvent",
    "Upload",
    "Url",
    "client_cookie_param",
    "client_exception_mapper",
    "client_form_param",
    "client_header_param",
    "client_query_param",
    "create_rest_client",
    "delete",
    "get",
    "head",
    "patch",
    "post",
    "propagate_headers",
    "put",
    "register_rest_client",
    "rest_settings",
]
