"""In a forked process, services either work or raise a clear error; nothing hangs.

Each test runs a separate program, because pytest runs threads that must not be forked.
"""

import os
import textwrap
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

START = '''
import asyncio, multiprocessing, os, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from toolbox import (AiMessage, Container, ContainerNotStartedError, MemoryId, Result, ToolboxError,
                     create_ai_service, register_ai_service, run_on, run_on_thread, tool)
from toolbox.testing import ScriptedChatModel, tool_call

warnings.simplefilter("error", ResourceWarning)


class Model:
    """Return a model that calls the tool `name` once and then replies with its process id."""

    def __init__(self, name="pid"):
        self.name = name

    async def chat(self, request):
        from toolbox import ChatResponse
        last = request.messages[-1]
        if last.__class__.__name__ == "UserMessage":
            return ChatResponse(AiMessage(None, [tool_call(self.name)]))
        return ChatResponse(AiMessage(last.text))


def in_child(work):
    """Return the text that `work` returns in a forked process, which must end within 20 s."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        import faulthandler
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
    return text


@tool
def pid() -> int:
    return os.getpid()


class Sync(Protocol):
    def ask(self, question: str) -> str: ...


class Async(Protocol):
    async def ask(self, question: str) -> str: ...
'''


def run(tmp_path: Path, program: str) -> list[str]:
    """Return the lines that the program prints."""
    file = tmp_path / "program.py"
    file.write_text(START + textwrap.dedent(program))
    done = programs.run([str(file)], tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_synchronous_services_without_a_container_work_in_parent_and_child(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        service = create_ai_service(Sync, chat_model=Model(), tools=pid, concurrent_tools=True)
        print(service.ask("q") == str(os.getpid()))
        print(in_child(lambda: service.ask("q") == str(os.getpid())))
        print(service.ask("q") == str(os.getpid()))
        """,
    )

    assert lines == ["True", "True", "True"]


@pytest.mark.parametrize("mark", ["tool", "lambda each: tool(run_on_thread(each))"])
def test_asynchronous_services_have_tool_threads_in_the_child(tmp_path: Path, mark: str) -> None:
    lines = run(
        tmp_path,
        f"""
        def where() -> int:
            return os.getpid()

        service = create_ai_service(Async, chat_model=Model("where"), tools=({mark})(where))
        print(asyncio.run(service.ask("q")) == str(os.getpid()))
        print(in_child(lambda: asyncio.run(service.ask("q")) == str(os.getpid())))
        """,
    )

    assert lines == ["True", "True"]


def test_the_child_works_while_all_threads_of_the_parent_are_busy(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        from toolbox.execution.threads import Workers
        import toolbox.hosts.standalone as standalone

        release, inside = threading.Event(), threading.Barrier(33)

        @tool
        def stuck() -> None:
            inside.wait()
            release.wait()

        async def fill() -> None:
            holder = create_ai_service(Async, chat_model=Model("stuck"), tools=stuck)
            tasks = [asyncio.create_task(holder.ask("q")) for _ in range(32)]
            await asyncio.to_thread(inside.wait)
            service = create_ai_service(Async, chat_model=Model(), tools=pid)
            print(await asyncio.to_thread(in_child, lambda: asyncio.run(service.ask("q")) == str(os.getpid())))
            release.set()
            await asyncio.gather(*tasks)

        asyncio.run(fill())
        """,
    )

    assert lines == ["True"]


def test_conversations_in_use_in_the_parent_are_free_in_the_child(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        class Chat(Protocol):
            def ask(self, room: MemoryId[str], question: str) -> str: ...

        release, inside = threading.Event(), threading.Event()

        @tool
        def hold() -> int:
            inside.set()
            if os.getpid() == parent:
                release.wait()
            return os.getpid()

        parent = os.getpid()
        service = create_ai_service(Chat, chat_model=Model("hold"), tools=hold)
        call = threading.Thread(target=service.ask, args=("7", "q"))
        call.start()
        inside.wait()
        print(in_child(lambda: service.ask("7", "q") == str(os.getpid())))
        release.set()
        call.join()
        """,
    )

    assert lines == ["True"]


def test_multiprocessing_workers_can_use_a_service_of_the_parent(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        service = create_ai_service(Sync, chat_model=Model(), tools=pid)

        def work(_):
            return service.ask("q") == str(os.getpid())

        service.ask("q")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map_async(work, range(4)).get(20))
        """,
    )

    assert lines == ["[True, True, True, True]"]


def test_children_exit_immediately(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        service = create_ai_service(Sync, chat_model=Model(), tools=pid)
        service.ask("q")
        child = os.fork()
        if child == 0:
            import faulthandler
            faulthandler.dump_traceback_later(20, exit=True)
            sys.exit(0)  # runs what is registered for the exit
        print(os.waitpid(child, 0)[1])
        """,
    )

    assert lines == ["0"]


@pytest.mark.parametrize("kind", ["Sync", "Async"])
def test_containers_of_the_parent_must_be_started_again_in_the_child(tmp_path: Path, kind: str) -> None:
    lines = run(
        tmp_path,
        f"""
        Service = register_ai_service(tools=pid)({kind})
        container = Container(models={{"default": Model()}}).register(Service)

        def ask(service):
            answer = service.ask("q")
            return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer

        def again():
            with container:
                service = container.get(Service)
                if {kind == "Async"}:
                    return asyncio.run(service.ask("q")) == str(os.getpid())
                return service.ask("q") == str(os.getpid())

        with container:
            service = container.get(Service)
            print(ask(service) == str(os.getpid()))
            print(in_child(lambda: ask(service)))
            print(in_child(lambda: container.get(Service)))
            print(in_child(container.request_scope))
            print(in_child(again))
            print(ask(service) == str(os.getpid()))
        """,
    )

    assert [lines[0], *lines[4:]] == ["True", "True", "True"]
    for line in lines[1:4]:
        assert line.startswith("ContainerNotStartedError")
        assert "before this process was forked" in line


def test_leaving_a_container_block_in_the_child_does_not_stop_the_parent(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        from collections.abc import Iterator
        from toolbox import produces

        class Session: ...

        @produces(scope="application")
        def session() -> Iterator[Session]:
            yield Session()
            print("closed by", "parent" if os.getpid() == parent else "child", flush=True)

        parent = os.getpid()
        container = Container().register(session)
        with container:
            container.get(Session)
            child = os.fork()
        if child == 0:
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        """,
    )

    assert sorted(lines) == ["0", "closed by parent"]


def test_preloaded_workers_start_their_own_container(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        # As gunicorn --preload does it: the program is loaded, and used, before its workers are forked.
        Service = register_ai_service(tools=pid)(Async)
        container = Container(models={"default": Model()}).register(Service)
        plain = create_ai_service(Sync, chat_model=Model(), tools=pid)
        assert container.check() == []
        plain.ask("warm up")
        with container:
            asyncio.run(container.get(Service).ask("warm up"))

        def worker():
            async def serve():
                async with container:
                    answers = [await container.get(Service).ask("q") for _ in range(2)]
                    answers.append(await asyncio.to_thread(plain.ask, "q"))
                    return set(answers) == {str(os.getpid())}

            return asyncio.run(serve())

        print([in_child(worker) for _ in range(2)])
        """,
    )

    assert lines == ["['True', 'True']"]


@pytest.mark.parametrize("how", ["run_on(executor)", "concurrent_tools=executor"])
def test_executors_used_in_the_parent_are_rejected_in_the_child(tmp_path: Path, how: str) -> None:
    mark = "run_on(executor)" if how.startswith("run_on") else "(lambda each: each)"
    together = "executor" if how.startswith("concurrent") else "False"
    lines = run(
        tmp_path,
        f"""
        executor = ThreadPoolExecutor(1)

        @tool
        @{mark}
        def where() -> int:
            return os.getpid()

        service = create_ai_service(Async, chat_model=Model("where"), tools=where, concurrent_tools={together})
        print(asyncio.run(service.ask("q")) == str(os.getpid()))
        print(in_child(lambda: asyncio.run(service.ask("q"))))
        """,
    )

    assert lines[0] == "True"
    assert lines[1].startswith("IllegalConfigurationError")
    assert "in each process, after the fork" in lines[1]


@pytest.mark.parametrize("is_new", [False, True])
def test_executors_used_in_the_parent_are_rejected_in_containers_of_the_child(tmp_path: Path, is_new: bool) -> None:
    lines = run(
        tmp_path,
        f"""
        executor = ThreadPoolExecutor(1)

        @tool
        @run_on("named")
        def where() -> int:
            return os.getpid()

        Service = register_ai_service(tools=where)(Async)

        def new_container():
            return Container(models={{"default": Model("where")}}, executors={{"named": executor}}).register(Service)

        async def ask(container):
            async with container:
                return await container.get(Service).ask("q") == str(os.getpid())

        container = new_container()
        print(asyncio.run(ask(container)))
        print(in_child(lambda: asyncio.run(ask(new_container() if {is_new} else container))))
        """,
    )

    assert lines[0] == "True"
    assert lines[1].startswith("IllegalConfigurationError")
    assert "in each process, after the fork" in lines[1]


def test_rest_clients_do_not_share_connections_with_the_parent(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
        from toolbox import rest

        ports = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                ports.append(self.client_address[1])
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"42")

            def log_message(self, *_): ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

        @rest.register_rest_client(base_url=f"http://127.0.0.1:{server.server_port}")
        class Numbers(Protocol):
            @rest.get("/number")
            def number(self) -> int: ...

        client = rest.create_rest_client(Numbers)
        print(client.number(), client.number(), in_child(client.number), client.number())
        print(len(set(ports)), ports[0] == ports[1] == ports[3])
        """,
    )

    assert lines == ["42 42 42 42", "2 True"]
