"""Errors keep their facts when pickled and copied, and their texts are readable."""

import copy
import inspect
import pickle
from typing import Any

import pytest

from toolbox import errors
from toolbox.chat import AiMessage, PendingCall, ToolExecutionRequest, UserMessage
from toolbox.errors import Problem

REQUEST = ToolExecutionRequest("c1", "add", '{"a": "x"}')
# A value for each parameter of the errors' constructors.
FACTS: dict[str, Any] = {
    "attempted": 7,
    "attributes": {"ticket": 7},
    "bean": "Reservation",
    "body": "<html>",
    "candidates": ("Card", "Invoice"),
    "code": -32000,
    "content": "PdfContent",
    "failures": ((ValueError, "too long"),),
    "field": "departure",
    "guardrail": ValueError,
    "limit": 3,
    "memory_id": "room 7",
    "message": "the server is tired",
    "method": "chat",
    "near": ("Payments",),
    "opened_by": "container.request_scope()",
    "path": "Checkout.session",
    "place": "messages.0.contents.1",
    "problems": [("a", "not a number"), ("", "too long")],
    "is_anonymous": True,
    "pending": (PendingCall("0/1", "refund", {"order": 7}, "shop:Desk", "approval"),),
    "reason": "no request scope is active",
    "run_id": "run-7",
    "error": "invalid_client",
    "error_type": "ValueError",
    "request": REQUEST,
    "requests": {"a": {"message": "How many?"}},
    "request_id": "req_1",
    "server": "files",
    "service": "Assistant",
    "state": "asked",
    "status": 503,
    "text": "{",
    "timeout": 2.5,
    "tool": "add",
    "tool_names": ("add", "sub"),
    "search_tool": "tool_search_tool",
    "transcript": (UserMessage("hi"), AiMessage(None, (REQUEST,))),
    "type_name": "socket",
    "url": "http://127.0.0.1/v1",
    "wanted": "Payments",
    "www_authenticate": "Bearer",
    "what": "Container.get(Payments)",
    "fix": "register it",
    "where": "Checkout, parameter 'payments'",
}


def all_errors() -> list[type[Exception]]:
    return [
        kind
        for name, kind in sorted(vars(errors).items())
        if inspect.isclass(kind) and issubclass(kind, Exception) and not name.startswith("_")
    ]


def made(kind: type[Exception]) -> Exception:
    if kind is errors.IllegalConfigurationError:
        return kind([Problem("Checkout.payments", "no bean provides Payments", "register one")])
    try:
        facts = inspect.signature(kind).parameters
    except ValueError:  # the constructor of `Exception`
        facts = {}
    if facts and facts.keys() <= FACTS.keys():
        return kind(**{name: FACTS[name] for name in facts})
    return kind("a text")


@pytest.mark.parametrize("kind", all_errors())
def test_errors_keep_their_facts_when_pickled_and_copied(kind: type[Exception]) -> None:
    error = made(kind)

    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert vars(other) == vars(error)
        assert str(other) == str(error)


def test_error_texts_do_not_contain_the_repr_of_arguments() -> None:
    for kind in all_errors():
        text = str(made(kind))

        assert text
        assert not text.startswith(("(", "["))
        assert "ToolExecutionRequest(" not in text


def test_errors_do_not_change_with_the_lists_that_they_were_made_from() -> None:
    names, problems = ["add", "sub"], [("a", "not a number")]
    unknown = errors.UnknownToolError(REQUEST, names)
    invalid = errors.ToolArgumentsError(REQUEST, problems)
    refused = errors.AnswerForbiddenError("run-7", "not an approver", problems)

    names.clear()
    problems.clear()

    assert unknown.tool_names == ("add", "sub")
    assert invalid.problems == [("a", "not a number")]
    assert refused.problems == (("a", "not a number"),)


def test_all_errors_except_tool_signals_are_toolbox_errors() -> None:
    outside = {kind.__name__ for kind in all_errors() if not issubclass(kind, errors.ToolboxError)}

    assert outside == {"ToolRetry", "ToolAbort", "ToolDeferred", "EndsInvocation"}


def test_timeouts_are_timeout_errors() -> None:
    for kind in all_errors():
        assert issubclass(kind, TimeoutError) == kind.__name__.endswith("TimeoutError")


def test_the_text_lists_all_problems() -> None:
    problems = [Problem(f"Bean{n}", f"fault {n}", f"fix {n}") for n in range(3)]

    text = str(errors.IllegalConfigurationError(problems))

    assert all(str(problem) in text for problem in problems)
