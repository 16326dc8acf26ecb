"""Tools that never return do not keep their container or process alive."""

import os
import textwrap
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.timeout(400)  # starts processes

START = '''
import asyncio, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from toolbox import (AiMessage, Container, InvocationTimeoutError, Result, ToolboxSettings, create_ai_service,
                     register_ai_service, run_on_thread, time_limit, tool)
from toolbox.testing import ScriptedChatModel, tool_call

inside = threading.Event()


class Sync(Protocol):
    def ask(self, question: str) -> str: ...


class Async(Protocol):
    async def ask(self, question: str) -> str: ...


def stuck() -> str:
    inside.set()
    threading.Event().wait()


def model():
    return ScriptedChatModel([AiMessage(None, [tool_call("stuck")]), "done"])


async def ask_for_a_moment(service):
    """Call the service and cancel the call as soon as its tool is stuck."""
    call = asyncio.create_task(service.ask("q"))
    await asyncio.to_thread(inside.wait)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
'''


def run(tmp_path: Path, program: str, **environment: str) -> tuple[list[str], str]:
    """Return what the program prints and logs. It must end without help."""
    file = tmp_path / "program.py"
    file.write_text(START + textwrap.dedent(program))
    settings = {**os.environ, "TOOLBOX_STOP_TIMEOUT": "0.5", **environment}
    done = programs.run([str(file)], tmp_path, settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("mark", ["tool", "lambda each: tool(run_on_thread(each))"])
def test_processes_end_while_a_tool_of_their_container_is_stuck(tmp_path: Path, mark: str) -> None:
    lines, errors = run(
        tmp_path,
        f"""
        Service = register_ai_service(tools=({mark})(stuck))(Async)

        async def main():
            async with Container(models={{"default": model()}}).register(Service) as container:
                asyncio.create_task(container.get(Service).ask("q"))
                await asyncio.to_thread(inside.wait)
            print("stopped")

        asyncio.run(main())
        """,
    )

    assert lines == ["stopped"]
    assert "stuck" in errors


@pytest.mark.parametrize("mark", ["tool", "lambda each: tool(run_on_thread(each))"])
def test_processes_end_while_a_tool_without_a_container_is_stuck(tmp_path: Path, mark: str) -> None:
    lines, errors = run(
        tmp_path,
        f"""
        service = create_ai_service(Async, chat_model=model(), tools=({mark})(stuck))
        asyncio.run(ask_for_a_moment(service))
        print("left")
        """,
    )

    assert lines == ["left"]
    assert "the program is exiting, but these tools still run: stuck" in errors


@pytest.mark.parametrize("contained", [True, False])
@pytest.mark.parametrize("late", ["tool(timeout=0.1)", "tool"])
def test_processes_end_while_a_tool_of_a_synchronous_service_is_stuck(
    tmp_path: Path, contained: bool, late: str
) -> None:
    lines, errors = run(
        tmp_path,
        f"""
        def ask(service):
            try:
                with time_limit({60 if "timeout" in late else 1.5}):
                    print(service.ask("q"))
            except InvocationTimeoutError as error:
                print("limited")

        mark = {late}
        if {contained}:
            Service = register_ai_service(tools=mark(stuck))(Sync)
            with Container(models={{"default": model()}}).register(Service) as container:
                ask(container.get(Service))
        else:
            ask(create_ai_service(Sync, chat_model=model(), tools=mark(stuck)))
        """,
    )

    assert lines == ["done" if "timeout" in late else "limited"]
    assert "stuck" in errors


def test_tools_that_wait_for_a_thread_do_not_keep_the_process_alive(tmp_path: Path) -> None:
    lines, _ = run(
        tmp_path,
        """
        Service = register_ai_service(tools=tool(run_on_thread(stuck)), concurrent_tools=True)(Async)
        calls = ScriptedChatModel([AiMessage(None, [tool_call("stuck") for _ in range(4)]), "done"])
        settings = ToolboxSettings(thread_limit=1, pool_size=1)

        async def main():
            async with Container(models={"default": calls}, settings=settings).register(Service) as container:
                asyncio.create_task(container.get(Service).ask("q"))
                await asyncio.to_thread(inside.wait)
            print("stopped")

        asyncio.run(main())
        """,
    )

    assert lines == ["stopped"]


def test_tools_that_end_in_time_finish_before_the_process_ends(tmp_path: Path) -> None:
    lines, errors = run(
        tmp_path,
        """
        import atexit

        ending = threading.Event()

        @tool
        def stuck() -> str:
            inside.set()
            ending.wait()
            threading.Event().wait(0.3)
            os.write(1, b"written\\n")

        service = create_ai_service(Async, chat_model=model(), tools=stuck)
        asyncio.run(ask_for_a_moment(service))
        print("left", flush=True)
        atexit.register(ending.set)  # the process waits for tools after that
        """,
        TOOLBOX_STOP_TIMEOUT="60",
    )

    assert lines == ["left", "written"]
    assert errors == ""


def test_containers_stop_while_a_tool_blocks_their_event_loop(tmp_path: Path) -> None:
    lines, errors = run(
        tmp_path,
        """
        from collections.abc import Iterator
        from toolbox import produces

        class Session: ...

        @produces(scope="application")
        def session() -> Iterator[Session]:
            yield Session()
            print("closed")

        @tool
        async def stuck() -> str:
            inside.set()
            threading.Event().wait()

        Service = register_ai_service(tools=stuck)(Sync)
        with Container(models={"default": model()}).register(Service, session) as container:
            container.get(Session)
            threading.Thread(target=container.get(Service).ask, args=("q",), daemon=True).start()
            inside.wait()
        print("stopped")
        """,
    )

    assert lines == ["closed", "stopped"]
    assert "blocks the container's event loop" in errors


def test_beans_that_need_the_blocked_event_loop_are_logged_and_the_others_are_closed(tmp_path: Path) -> None:
    lines, errors = run(
        tmp_path,
        """
        from collections.abc import AsyncIterator, Iterator
        from dependency_injector import containers, providers
        from toolbox import ContainerNotStartedError, application_scoped, produces

        class Session: ...

        @produces(scope="application")
        def session() -> Iterator[Session]:
            yield Session()
            print("session closed")

        @application_scoped
        class Pool:
            async def stop(self) -> None:
                print("never")

        @produces(scope="application")
        async def connection() -> AsyncIterator[int]:
            yield 1
            print("never")

        class Included(containers.DeclarativeContainer):
            session = providers.Dependency(instance_of=Session)
            holder = providers.Singleton(list, session)

        @tool
        async def stuck() -> str:
            inside.set()
            threading.Event().wait()

        Service = register_ai_service(tools=stuck)(Sync)
        included = Included()
        container = Container(models={"default": model()}).register(Service, Pool, session, connection)
        with container.include(included):
            container.get(Session)
            container.get(Pool)
            service = container.get(Service)
            threading.Thread(target=service.ask, args=("q",), daemon=True).start()
            inside.wait()
        print("stopped", included.session.last_overriding)
        try:
            service.ask("q")
        except ContainerNotStartedError:
            print("refused")
        """,
    )

    assert lines == ["session closed", "stopped None", "refused"]
    assert "cannot close Pool, int: the event loop is blocked" in errors


def test_processes_end_while_a_tool_blocks_the_shared_event_loop(tmp_path: Path) -> None:
    lines, errors = run(
        tmp_path,
        """
        @tool
        async def stuck() -> str:
            inside.set()
            threading.Event().wait()

        service = create_ai_service(Sync, chat_model=model(), tools=stuck)
        threading.Thread(target=service.ask, args=("q",), daemon=True).start()
        inside.wait()
        print("left")
        """,
    )

    assert lines == ["left"]
    assert "is blocked" in errors


def test_tasks_that_ignore_cancellation_do_not_keep_the_process_alive(tmp_path: Path) -> None:
    lines, errors = run(
        tmp_path,
        """
        @tool
        async def stuck() -> str:
            inside.set()
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass

        service = create_ai_service(Sync, chat_model=model(), tools=stuck)
        threading.Thread(target=service.ask, args=("q",), daemon=True).start()
        inside.wait()
        print("left")
        """,
    )

    assert lines == ["left"]
    assert "ignores its cancellation" in errors
