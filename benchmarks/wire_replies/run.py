"""Runs the recorded replies of this folder against a client.

    python run.py --driver my_driver:drive [--case ID …] [--json out.json] [-v]

A driver is ``async def drive(base_url, stream, tools, user_message) -> {"text": str | None, "error": str | None,
"calls": [{"name", "arguments"}] | None}``. ``tools`` are ``async def`` functions with type hints and docstrings. They
record their calls, and these records are used instead of ``calls``. ``error`` is one of ERRORS, or ``crash:<Type>`` for
another exception. Configure the client to return unknown tools and invalid arguments to the model. The API key is
"test" and the model is "m". Nothing is read from the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(Path.cwd())]
from server import BackgroundServer, load_cases, to_bytes  # noqa: E402

ERRORS = (
    "model_http_error",
    "model_protocol_error",
    "model_connection_error",
    "truncated",
    "refused",
    "tool_error",
    "limit",
)
TIMEOUT_S = 90.0
Driver = Callable[[str, bool, list[Callable[..., Any]], str], Awaitable[dict[str, Any]]]


def make_tools(record: list[dict[str, Any]]) -> list[Callable[..., Any]]:
    """The fixed tools, each noting what it was called with, in the order in which the calls began."""

    async def add(a: int, b: int) -> int:
        """Add two whole numbers."""
        record.append({"name": "add", "arguments": {"a": a, "b": b}})
        return a + b

    async def now() -> str:
        """Tell the time."""
        record.append({"name": "now", "arguments": {}})
        return "2026-01-02T12:00:00Z"

    async def echo(text: str) -> str:
        """Say the text again."""
        record.append({"name": "echo", "arguments": {"text": text}})
        return text if len(text) < 1000 else f"{len(text)} characters"

    async def slow(ms: int) -> str:
        """Wait some milliseconds."""
        record.append({"name": "slow", "arguments": {"ms": ms}})
        await asyncio.sleep(ms / 1000)
        return f"waited {ms}"

    return [add, now, echo, slow]


def plain(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"repeat", "times"}:
        return to_bytes(value).decode()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) < 140 else text[:100] + f"… ({len(text)} characters)"


def verdict(
    case: dict[str, Any], got: dict[str, Any], record: list[dict[str, Any]], report: dict[str, Any]
) -> tuple[list[str], bool]:
    """(what is wrong, whether it is only that an error was due and another one came)."""
    expect, wrong, kind_only = case["expect"], [], True
    accepted = expect["error"] if isinstance(expect["error"], list) else [expect["error"]]
    error = got.get("error")
    if error not in accepted:
        if error is None:
            wrong.append(f"no error, text {short(got.get('text'))}; expected {accepted}")
        else:
            wrong.append(f"error {error} ({got.get('detail', '')[:160]}); expected {accepted}")
        if error in (None, "crash:Timeout") or accepted == [None]:
            kind_only = False
    elif error is not None and (want := expect.get("error_contains")) and want not in got.get("detail", ""):
        wrong.append(f"the error does not say {want!r}: {got.get('detail', '')[:160]}")
    text = got.get("text") or ""
    if (
        error is None
        and None in accepted
        and (not isinstance(text, str) or text.strip() != (expect["final_text"] or "").strip())
    ):
        wrong.append(f"text {short(got.get('text'))}; expected {short(expect['final_text'])}")
        kind_only = False
    calls = record or got.get("calls") or []
    expected = [plain(call) for call in expect["tool_calls"]]
    if calls != expected:
        wrong.append(f"ran {short(calls)}; expected {short(expected)}")
        kind_only = False
    if report["requests"] != expect["requests"]:
        wrong.append(f"{report['requests']} requests; expected {expect['requests']}")
        kind_only = False
    if (want := expect.get("min_gap_ms")) and report["gaps_ms"] and report["gaps_ms"][0] < want:
        wrong.append(f"asked again after {report['gaps_ms'][0]} ms; the server asked to wait {want}")
        kind_only = False
    if report["problems"]:
        wrong += report["problems"]
        kind_only = False
    return wrong, kind_only


async def run_case(drive: Driver, case: dict[str, Any], server: BackgroundServer) -> dict[str, Any]:
    record: list[dict[str, Any]] = []
    key = f"{case['id']}~{time.monotonic_ns()}"
    began = time.monotonic()
    try:
        got = await asyncio.wait_for(
            drive(server.base_url(key), case["stream"], make_tools(record), case["user"]), TIMEOUT_S
        )
    except TimeoutError:
        got = {"text": None, "error": "crash:Timeout", "detail": f"no end after {TIMEOUT_S:.0f} s"}
    except Exception as error:
        got = {"text": None, "error": f"crash:{type(error).__name__}", "detail": str(error)}
    seconds = time.monotonic() - began
    wrong, kind_only = verdict(case, got, record, server.report(key))
    return {
        "id": case["id"],
        "level": case["level"],
        "title": case["title"],
        "passed": not wrong,
        "loose": not wrong or kind_only,
        "wrong": wrong,
        "seconds": round(seconds, 2),
    }


def count(results: list[dict[str, Any]], key: str = "passed", **where: Any) -> str:
    chosen = [r for r in results if all(r[k] == v for k, v in where.items())]
    return f"{sum(r[key] for r in chosen)} of {len(chosen)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--driver", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument("--cases", type=Path, default=HERE / "cases")
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("-v", action="store_true", help="also show what passed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    module, _, function = options.driver.partition(":")
    drive: Driver = getattr(importlib.import_module(module), function or "drive")
    cases = load_cases(options.cases)
    chosen = [case for case in cases.values() if not options.case or case["id"] in options.case]

    async def run_all(server: BackgroundServer) -> list[dict[str, Any]]:
        results = []
        for case in chosen:
            results.append(result := await run_case(drive, case, server))
            if not result["passed"] or options.v:
                mark = "pass" if result["passed"] else "kind" if result["loose"] else "FAIL"
                print(f"{mark}  {result['id']:24} {result['title']}  [{result['seconds']} s]", flush=True)
                for line in result["wrong"][:4]:
                    print(f"        {line}")
        return results

    with BackgroundServer(cases) as server:
        results = asyncio.run(run_all(server))
    if options.json:
        options.json.write_text(json.dumps(results, ensure_ascii=False, indent=1))
    print(
        f"\n{options.driver}: {count(results)}   (must {count(results, level='must')}, "
        f"should {count(results, level='should')}; "
        f"any exception accepted where an error is due: {count(results, key='loose')})"
    )
    return 0 if all(r["passed"] for r in results if r["level"] == "must") else 1


if __name__ == "__main__":
    sys.exit(main())
