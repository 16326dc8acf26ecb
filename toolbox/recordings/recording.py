"""`Recording`: the traffic with a real model server, kept in a file and played back without a network.

It stands at the wire, as the `transport=` of an `OpenAiChatModel`: what a test then runs is all of the real thing but
the socket, from the bytes of a request to the pieces of a stream; a recorder around a `ChatModel` would skip just the
part in which servers differ. Not here: the file's form (`tapes`), the fixture (`pytest_plugin`), a model without a
server (`testing`).
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import httpx2

from ..errors import FrameworkError
from .differences import differences
from .tapes import PATHS, Asked, Exchange, Reply, Secrets, Tape, is_kept

Mode: TypeAlias = Literal["auto", "replay", "record"]

VARIABLE = "TOOLBOX_RECORDING"
RECORD_IT = f"run it once with {VARIABLE}=record and the server's key, and commit the file"


class RecordingError(FrameworkError):
    """A request is not in the recording, or there is no recording, or it cannot be read."""

    def __init__(self, file: str, reason: str, fix: str = RECORD_IT) -> None:
        super().__init__(file, reason, fix)
        self.file, self.reason, self.fix = file, reason, fix

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}; {self.fix}"


class Recording(httpx2.AsyncBaseTransport):
    """A recording in `file`: `OpenAiChatModel("gpt-…", transport=Recording("weather.json"))`.

    `mode` is `"replay"`, `"record"` (from the beginning) or `"auto"`: replay if the file is there, else record. Without
    it the variable `TOOLBOX_RECORDING` decides, then `CI`, under which nothing is recorded; else it is `"auto"`.

    A request is found by its path and body, each as often as it was recorded, in whatever order. `rewrite` is given a
    copy of each body before it is compared and written, and returns it without what changes from run to run. Headers,
    address and query are never written; of a body's top level the wire's own fields, and those in `fields`. `paths` are
    the ends of the paths that belong to the wire: for another one than OpenAI's, give its `paths` and `fields`. Kept
    are replies after which a conversation goes on or ends: not those that are tried again, nor 401 and 403. In replay
    neither key nor address is needed.
    """

    def __init__(
        self,
        file: str | Path,
        mode: Mode | None = None,
        *,
        rewrite: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        fields: Iterable[str] = (),
        paths: Iterable[str] = PATHS,
    ) -> None:
        self.file = Path(file)
        self._rewrite, self._fields = rewrite, frozenset(fields)
        self._paths = tuple(paths)
        self._secrets = Secrets()
        self._lock = threading.Lock()
        self.missed: list[RecordingError] = []
        """The requests that were not found, as the errors that were raised."""
        mode = mode or mode_from_environment()
        if mode not in ("auto", "replay", "record"):
            raise ValueError(f"mode={mode!r}; use 'auto', 'replay' or 'record'")
        self.is_recording = mode == "record" or (mode == "auto" and not self.file.exists())
        """Whether the server is asked."""
        self._tape = Tape() if self.is_recording else self._read()
        self._played = [False] * len(self._tape.exchanges)

    def __repr__(self) -> str:
        return f"Recording({str(self.file)!r}, {'record' if self.is_recording else 'replay'!r})"

    def _read(self) -> Tape:
        try:
            return Tape.read(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecordingError(str(self.file), "there is no such recording, and nothing is recorded here") from None
        except ValueError as error:
            raise RecordingError(str(self.file), f"it cannot be read: {error}") from error

    # --- the transport that a client is given

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The reply, from the file or from the server. Raises `RecordingError`."""
        body = await request.aread()
        try:
            asked = Asked.of(request.url.path, body, self._fields, self._rewrite, self._paths)
        except ValueError as error:
            raise RecordingError(str(self.file), str(error), "give other requests another transport") from error
        if self.is_recording:
            return await self._ask(request, asked)
        with self._lock:
            return _response(self._find(asked))

    async def aclose(self) -> None:
        """Nothing is open between requests."""

    # --- playing back

    def _find(self, asked: Asked) -> Reply:
        same = [number for number, each in enumerate(self._tape.exchanges) if each.asked == asked]
        for number in same:
            if not self._played[number]:
                self._played[number] = True
                return self._tape.exchanges[number].reply
        error = RecordingError(str(self.file), self._missing(asked, len(same)), f"if that is right, {RECORD_IT}")
        self.missed.append(error)
        raise error

    def _missing(self, asked: Asked, times: int) -> str:
        if times:
            return f"this request was recorded {times} times, and is made once more"
        number = f"request {sum(self._played) + 1} is not in the recording of {len(self._tape.exchanges)}"
        found = [(each, differences(each.asked, asked)) for each in self._unplayed() or self._tape.exchanges]
        if not found:
            return number
        told = min((lines for _, lines in found), key=len)
        return "\n  ".join([f"{number}; it differs from the nearest:", *told])

    def _unplayed(self) -> list[Exchange]:
        return [each for each, played in zip(self._tape.exchanges, self._played, strict=True) if not played]

    # --- recording

    async def _ask(self, request: httpx2.Request, asked: Asked) -> httpx2.Response:
        self._secrets.learn(
            request.headers.multi_items(), json.loads(await request.aread()), str(request.url), self._fields
        )
        request.headers["accept-encoding"] = "identity"  # so that a person can read what came
        with self._lock:
            place = self._tape.reserve()
        client = httpx2.AsyncClient(follow_redirects=False)
        try:
            response = await client.send(request, stream=True)
        except BaseException:
            await client.aclose()
            raise

        # Some servers compress all the same; a secret in such bytes could not be found.
        is_readable = response.headers.get("content-encoding", "identity") in ("identity", "gzip", "deflate")
        pieces = response.aiter_bytes() if is_readable else response.aiter_raw()
        without = ("content-encoding", "content-length") if is_readable else ()
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in without]

        def keep(chunks: list[bytes]) -> None:
            if is_kept(response.status_code) and is_readable:
                reply = Reply.of(response.status_code, response.headers.get("content-type"), None, chunks)
                with self._lock:
                    self._tape.put(place, Exchange(asked, self._secrets.hidden_in(reply)))
                    self._write()

        return httpx2.Response(response.status_code, headers=headers, stream=_Overheard(client, response, pieces, keep))

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        unfinished.write_text(self._tape.written(), encoding="utf-8")
        unfinished.replace(self.file)


def mode_from_environment() -> Mode:
    """What `TOOLBOX_RECORDING` says, else `"replay"` under `CI`, else `"auto"`."""
    said = os.environ.get(VARIABLE)
    if said:
        return cast(Mode, said.lower())
    return "auto" if os.environ.get("CI", "").lower() in ("", "0", "false") else "replay"


class _Overheard(httpx2.AsyncByteStream):
    """A reply on its way to the client, whose pieces are kept when it has come, or when the client has enough."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        response: httpx2.Response,
        pieces: AsyncIterator[bytes],
        keep: Callable[[list[bytes]], None],
    ) -> None:
        self._client, self._response, self._pieces, self._keep = client, response, pieces, keep
        self._chunks: list[bytes] = []
        self._is_whole = self._is_broken = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._pieces:
                self._chunks.append(chunk)
                yield chunk
        except (Exception, asyncio.CancelledError):
            self._is_broken = True
            raise
        self._is_whole = True

    async def aclose(self) -> None:
        await self._response.aclose()
        await self._client.aclose()
        if self._is_whole or (self._chunks and not self._is_broken):
            self._keep(self._chunks)


class _Chunks(httpx2.AsyncByteStream):
    """The pieces of a recorded reply."""

    def __init__(self, chunks: tuple[bytes, ...]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            await asyncio.sleep(0)  # as from a network: others run between the pieces
            yield chunk

    async def aclose(self) -> None:
        """Nothing is open."""


def _response(reply: Reply) -> httpx2.Response:
    headers = {"content-type": reply.content_type, "content-encoding": reply.content_encoding}
    given = {name: value for name, value in headers.items() if value is not None}
    return httpx2.Response(reply.status, headers=given, stream=_Chunks(reply.chunks))
