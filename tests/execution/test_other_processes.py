"""Tools that run in other processes."""

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.execution.picklable import Asking, Assistant, process_of, report_from_another_process, variable
from toolbox import (
    AiMessage,
    Container,
    Progress,
    ToolExecuted,
    create_ai_service,
    run_on,
    tool,
)
from toolbox.context import invocation_attributes
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        yield processes


@pytest.fixture
def forked() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        yield processes


async def test_process_pools_run_picklable_functions(spawned: ProcessPoolExecutor) -> None:
    there = tool(run_on(spawned)(process_of))
    model = ScriptedChatModel([tool_call("process_of", {"number": 7}), "done"])
    result = await create_ai_service(Assistant, chat_model=model, tools=(there,)).chat("x")
    pid, number = result.tool_executions[0].result.split()
    assert number == "7"
    assert int(pid) != os.getpid()


@pytest.mark.parametrize("start", ["forked", "spawned"])
async def test_other_processes_receive_the_picklable_attributes_of_the_call_only(
    start: str, request: pytest.FixtureRequest
) -> None:
    asks = AiMessage(None, [tool_call("attributes_there")])
    model = ScriptedChatModel([asks, "ok", asks, "ok"])
    variable.set("here")
    processes = request.getfixturevalue(start)  # a process is forked here or later, with the variable
    container = Container(models={"default": model}, executors={"processes": processes}).register(Asking)
    async with container:
        seen = []
        for tenant in ("ann", "bob"):
            with invocation_attributes(tenant=tenant, lock=threading.Lock()):
                result = await container.get(Asking).ask("whose?")
            seen.append(result.tool_executions[0].result_object)

    assert seen == [[{"tenant": name}, {"tenant": name}, "unset"] for name in ("ann", "bob")]


async def test_a_tool_in_another_process_cannot_report_progress_but_runs(spawned: ProcessPoolExecutor) -> None:
    there = tool(run_on(spawned)(report_from_another_process))
    model = ScriptedChatModel([tool_call("report_from_another_process", {"rows": 2}), "x"])
    assistant = create_ai_service(Assistant, chat_model=model, tools=[there])
    events = [each async for each in assistant.events("q")]
    [executed] = [each.execution for each in events if isinstance(each, ToolExecuted)]
    assert executed.result == "done"
    assert isinstance(pickle.loads(pickle.dumps(Progress())), Progress)
