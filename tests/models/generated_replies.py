"""Replies that a program writes: large and deep ones, and one text in all framings of event streams.

Not here: replies in data files (`seen`).
"""

import json

from tests.models.scripted_server import Scripted, call, chunk, completion, sse, stream
from tests.models.seen import Case, raw, seen

NOW = ("now", {})


def whole(*calls: dict[str, object]) -> Scripted:
    return completion({"role": "assistant", "content": None, "tool_calls": list(calls)}, "tool_calls")


def echo(*pieces: str) -> Scripted:
    """A streamed call of `echo` whose arguments arrive in these pieces."""
    first, *others = pieces
    opening = chunk({"tool_calls": [call("echo", first, id="c", index=0)]})
    rest = [chunk({"tool_calls": [call(None, each, index=0)]}) for each in others]
    return stream(opening, *rest, chunk({}, "tool_calls"))


LARGE = [
    seen(
        "any",
        "a long argument",
        whole(call("echo", json.dumps({"text": "é" * 500_000}), id="c")),
        ("echo", {"text": "é" * 500_000}),
    ),
    seen(
        "any",
        "a long argument in fragments",
        echo('{"text": "', *["x" * 1000] * 300, '"}'),
        ("echo", {"text": "x" * 300_000}),
    ),
    seen(
        "any",
        "a deep argument",
        whole(call("echo", '{"text": ' + "[" * 3000 + "]" * 3000 + "}", id="c")),
        result="echo",
    ),
    seen("any", "three hundred calls", whole(*[call("now", "{}", id=f"c{i}") for i in range(300)]), *[NOW] * 300),
    seen(
        "any",
        "twenty thousand events",
        raw(
            b"".join(
                sse(chunk({"content": "Hello"}), *[chunk({"content": ""})] * 20_000, chunk({}, "stop"), done=False)
            )
        ),
        text="Hello",
    ),
]


# --- framings of event streams


def framed(*chunks: bytes, what: str) -> Case:
    return Case(f"frame: {what}", raw(*chunks), text="Hé😀lo")


LINES = [json.dumps(chunk({"content": text}), ensure_ascii=False).encode() for text in ("Hé", "😀", "lo")]
LINES.append(json.dumps(chunk({}, "stop")).encode())
BODY = b"".join(b"data: " + line + b"\n\n" for line in LINES) + b"data: [DONE]\n\n"
FRAMES = [
    framed(BODY, what="all at once"),
    framed(*(BODY[i : i + 1] for i in range(len(BODY))), what="byte by byte"),
    framed(*(BODY[i : i + 7] for i in range(0, len(BODY), 7)), what="in pieces that cut characters"),
    framed(BODY.replace(b"\n", b"\r\n"), what="CRLF"),
    framed(*(BODY.replace(b"\n", b"\r\n")[i : i + 5] for i in range(0, 2 * len(BODY), 5)), what="CRLF in pieces"),
    framed(BODY.replace(b"\n", b"\r"), what="CR"),
    framed(BODY.replace(b"data: ", b"data:"), what="no space after the colon"),
    framed(BODY.replace(b"\n\n", b"\n"), what="no blank lines"),
    framed(BODY.rstrip(b"\n"), what="no line end at the end"),
    framed(b"\xef\xbb\xbf" + BODY, what="a byte order mark"),
    framed(b"\n\n" + BODY, what="blank lines first"),
    framed(b": ping\n\nretry: 100\nid: 1\nevent: message\n" + BODY, what="comments and other fields"),
    framed(b"data:\n\n" + BODY.replace(b"\n\n", b"\n\ndata: \n\n"), what="empty data"),
    framed(b"event: ping\ndata: now\n\n" + BODY, what="a ping that is not JSON"),
    framed(b'data: {"type": "ping"}\n\n' + BODY, what="a ping that is JSON"),
    framed(b'data: 7\n\ndata: null\n\ndata: "x"\n\n' + BODY, what="JSON that is not an object"),
    framed(
        b"".join(
            b"".join(
                b"data: " + part + b"\n"
                for part in json.dumps(json.loads(line), indent=1, ensure_ascii=False).encode().split(b"\n")
            )
            + b"\n"
            for line in LINES
        ),
        what="an event over several data lines",
    ),
    framed(BODY.replace(b"\n\n", b""), what="all events in one line"),
    framed(b"".join(b"event: chunk\ndata: " + line + b"\n" for line in LINES), what="named events without blank lines"),
    framed(BODY + b"event: done\ndata: bye\n\n", what="an event named done"),
    framed(BODY.replace(b"[DONE]", b'"[DONE]"'), what="[DONE] in quotes"),
    framed(BODY.replace(b"[DONE]", b" [DONE] "), what="[DONE] padded"),
    framed(
        b"".join(
            b"data: " + json.dumps(chunk({"content": each})).encode() + b"\n\n"
            for each in ("H\u00e9", "\ud83d", "\ude00", "lo")
        )
        + b"data: "
        + LINES[-1]
        + b"\n\n",
        what="the halves of a character in two events",
    ),
]

GENERATED = [*LARGE, *FRAMES]
