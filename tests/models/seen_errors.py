"""Errors in the formats of servers and gateways."""

import json

from tests.models.scripted_server import Scripted, chunk, completion, stream
from tests.models.seen import HEL, LO, SAID, STOP, choice, events, json_text, raw, seen
from tests.models.server_replies import ERROR, document
from toolbox import ModelHttpError, ModelProtocolError, ModelRefusedError

ERRORS = [
    seen(
        "llama.cpp, coddy-agent#104",
        "a line error:",
        raw(
            events(chunk({"role": "assistant"})),
            'error: {"code":400,"message":"the request exceeds the available context size"}\n\ndata: [DONE]\n\n',
        ),
        error=ModelHttpError,
        says="the request exceeds",
        status=400,
    ),
    seen(
        "lemonade#2826",
        "JSON without data: in an event stream",
        raw(json.dumps(ERROR)),
        error=ModelHttpError,
        says="overloaded",
    ),
    seen(
        "lemonade#2826",
        "JSON without data: after the first event",
        raw(events(HEL), json.dumps(ERROR) + "\n"),
        error=ModelHttpError,
        says="overloaded",
    ),
    seen(
        "OpenRouter",
        "beside a choice that says error",
        stream(
            HEL,
            {
                "error": {"code": 502, "message": "Provider disconnected"},
                **choice(delta={"content": ""}, finish_reason="error"),
            },
        ),
        error=ModelHttpError,
        says="Provider disconnected",
        status=502,
    ),
    seen(
        "OpenRouter",
        "the provider's words in metadata",
        json_text(
            error={
                "message": "Provider returned error",
                "code": 429,
                "metadata": {"raw": '{"error": {"message": "quota exceeded"}}', "provider_name": "x"},
            },
            user_id="u",
        ),
        error=ModelHttpError,
        says="quota exceeded",
    ),
    seen(
        "OpenRouter",
        "in the choice, its code a number",
        json_text(
            choices=[
                {
                    "error": {"code": 504, "message": "upstream timed out"},
                    "message": {"role": "assistant", "content": ""},
                    "finish_reason": "error",
                }
            ]
        ),
        error=ModelHttpError,
        says="upstream timed out",
        status=504,
    ),
    seen(
        "vLLM",
        "object error",
        json_text(object="error", message="maximum context length", type="BadRequestError", param=None, code=400),
        error=ModelHttpError,
        says="maximum context length",
        status=400,
    ),
    seen(
        "vLLM",
        "an error event without an object",
        stream(chunk({"role": "assistant"}), {"object": "error", "message": "engine dead", "code": 500}),
        error=ModelHttpError,
        says="engine dead",
        status=500,
    ),
    seen(
        "SGLang",
        "a code that is text",
        stream(HEL, {"error": {"message": "aborted", "code": "500"}}),
        error=ModelHttpError,
        says="aborted",
        status=500,
    ),
    seen(
        "TGI",
        "error and error_type",
        stream({"error": "Input validation error", "error_type": "validation"}),
        error=ModelHttpError,
        says="Input validation error",
    ),
    seen(
        "Ollama",
        "an error that is a text, mid-stream",
        stream(HEL, {"error": "llama runner process has terminated"}),
        error=ModelHttpError,
        says="runner process",
    ),
    seen(
        "Ollama",
        "a line of JSON",
        raw(events(HEL), '{"error":"an error was encountered while running the model"}\n'),
        error=ModelHttpError,
        says="was encountered",
    ),
    seen(
        "MiniMax",
        "base_resp beside null choices",
        json_text(id="1", choices=None, base_resp={"status_code": 1008, "status_msg": "insufficient balance"}),
        error=ModelHttpError,
        says="insufficient balance",
    ),
    seen(
        "MiniMax",
        "base_resp that is well",
        completion(SAID, base_resp={"status_code": 0, "status_msg": ""}),
        text="Hello",
    ),
    seen(
        "Langchain-Chatchat#2607",
        "error_code beside null choices",
        stream(
            chunk({"role": "assistant"}), {"id": None, "choices": None, "error_code": 500, "text": "the request failed"}
        ),
        error=ModelHttpError,
        says="the request failed",
        status=500,
    ),
    seen(
        "Bedrock gateways",
        "message alone",
        json_text(message="Too many tokens, please wait"),
        error=ModelHttpError,
        says="Too many tokens",
    ),
    seen(
        "API Gateway",
        "Message alone",
        json_text(Message="User is not authorized"),
        error=ModelHttpError,
        says="not authorized",
    ),
    seen(
        "Gemini",
        "in a list",
        document(json.dumps([{"error": {"code": 429, "message": "quota", "status": "RESOURCE_EXHAUSTED"}}])),
        error=ModelHttpError,
        says="quota",
        status=429,
    ),
    seen(
        "Gemini",
        "in a list, in a stream",
        Scripted(chunks=[json.dumps([{"error": {"code": 503, "message": "overloaded"}}], indent=1).encode()]),
        error=ModelHttpError,
        says="overloaded",
        status=503,
    ),
    seen(
        "FastAPI",
        "detail as a list",
        json_text(detail=[{"loc": ["body"], "msg": "field required"}]),
        error=ModelHttpError,
        says="field required",
    ),
    seen(
        "Zhipu",
        "code and msg",
        json_text(code=1302, msg="rate limited", success=False),
        error=ModelHttpError,
        says="rate limited",
    ),
    seen(
        "CommandCode#785",
        "success false and an error",
        json_text(success=False, error={"code": "INTERNAL_SERVER_ERROR", "status": 500, "message": "unexpected"}),
        error=ModelHttpError,
        says="unexpected",
        status=500,
    ),
    seen(
        "Apigee",
        "fault",
        json_text(fault={"faultstring": "Spike arrest", "detail": {"errorcode": "x"}}),
        error=ModelHttpError,
        says="Spike arrest",
    ),
    seen(
        "Azure",
        "an error without a message",
        json_text(error={"code": "content_filter", "type": None}),
        error=ModelHttpError,
        says="content_filter",
    ),
    seen(
        "Anthropic gateways",
        "type error",
        raw('event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'),
        error=ModelHttpError,
        says="Overloaded",
    ),
    seen(
        "any",
        "event: error without data that is JSON",
        raw(events(HEL), "event: error\ndata: upstream gone\n\n"),
        error=ModelHttpError,
        says="upstream gone",
    ),
    seen(
        "any",
        "event: error over two data lines",
        raw(events(HEL), 'event: error\ndata: {"error":\ndata: {"message": "overloaded"}}\n\n'),
        error=ModelHttpError,
        says="overloaded",
    ),
    seen(
        "any",
        "event: error after its data",
        raw(events(HEL), 'data: {"message": "overloaded"}\nevent: error\n\n'),
        error=ModelHttpError,
        says="overloaded",
    ),
    seen(
        "any",
        "the end cut off an error event",
        raw(events(HEL), 'event: error\ndata: {"message": "overloaded"}'),
        error=ModelHttpError,
        says="overloaded",
    ),
    seen("any", "error false", completion(SAID, error=False), text="Hello"),
    seen(
        "any",
        "error an empty text in a chunk of usage",
        stream(HEL, LO, STOP, {"choices": [], "usage": {}, "error": ""}),
        text="Hello",
    ),
    seen("any", "error an empty object beside a choice", completion(SAID, error={}), text="Hello"),
    seen(
        "nginx",
        "a page in the middle",
        raw(events(HEL), "<html><h1>504 Gateway Time-out</h1></html>\n"),
        error=ModelProtocolError,
        says="504 Gateway",
    ),
    seen(
        "uvicorn",
        "words in the middle",
        raw(events(HEL), "Internal Server Error"),
        error=ModelProtocolError,
        says="Internal Server Error",
    ),
    seen(
        "any",
        "words as an event",
        raw(events(HEL), "data: upstream gone\n\n"),
        error=ModelProtocolError,
        says="upstream gone",
    ),
    seen(
        "Cloudflare",
        "a page in an event stream",
        raw("<!DOCTYPE html><title>Just a moment...</title>"),
        error=ModelProtocolError,
        says="Just a moment",
    ),
    seen("any", "204", Scripted(status=204), error=ModelProtocolError),
    *(
        seen("any", f"{body!r} for a body", document(body), error=ModelProtocolError)
        for body in (
            "null",
            "[]",
            "{}",
            '""',
            "true",
            "0",
            " ",
            "\ufeff",
            "OK",
            '{"choices": {}}',
            '{"choices": "x"}',
            '{"choices": [[]]}',
            '{"choices": [{}]}',
            '{"choices": [{"text": "Hello"}]}',
            '{"choices": [{"delta": null}]}',
        )
    ),
    seen(
        "Ollama's own API",
        "no choices, another form",
        json_text(model="m", message=SAID, done=True),
        error=ModelProtocolError,
        says="Hello",
    ),
    *(
        seen(
            "any",
            f"{status} with a page",
            document("<h1>Bad</h1>", status, "text/html"),
            error=ModelHttpError,
            says=str(status),
        )
        for status in (400, 401, 403, 404, 413, 422, 451)
    ),
    *(
        seen(
            "any",
            f"{status} with a word",
            document("no such model", status, "text/plain"),
            error=ModelHttpError,
            says="no such model",
            status=status,
        )
        for status in (400, 404)
    ),
    seen("any", "400 with a broken body", document('{"error": {"mess', 400), error=ModelHttpError, says="400"),
    seen("any", "400 whose error is null", document('{"error": null}', 400), error=ModelHttpError, says="400"),
    seen(
        "any",
        "a refusal in a part",
        completion({"content": [{"type": "refusal", "refusal": "No."}]}),
        error=ModelRefusedError,
        says="No.",
    ),
    seen(
        "Azure",
        "content_filter in a stream",
        stream(chunk({"role": "assistant"}), chunk({}, "content_filter")),
        error=ModelRefusedError,
    ),
    seen("any", "content_filter, then stop", stream(chunk({}, "content_filter"), STOP), error=ModelRefusedError),
    *(
        seen(
            "any",
            f"no message: {json.dumps(fields)}",
            json_text(object="chat.completion", choices=[{"index": 0, **fields}]),
            error=ModelProtocolError,
            says="message is null",
        )
        for fields in (
            {"message": None, "finish_reason": "stop"},
            {"message": None, "finish_reason": None},
            {"message": None, "delta": {}, "finish_reason": "stop"},
            {"message": None},
            {"finish_reason": "stop"},
        )
    ),
    seen(
        "Azure",
        "a choice without a message that the filter stopped",
        json_text(
            object="chat.completion",
            choices=[
                {"index": 0, "finish_reason": "content_filter", "content_filter_results": {"hate": {"filtered": True}}}
            ],
            usage={"prompt_tokens": 15, "completion_tokens": 19},
        ),
        error=ModelRefusedError,
        says="content filter",
    ),
    seen(
        "any",
        "a null message in a stream",
        stream({"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]}),
        error=ModelProtocolError,
        says="message is null",
    ),
    *(
        seen(
            "OpenAI",
            f"nothing but {named}",
            reply({"role": "assistant", "content": None, **message}),
            error=ModelProtocolError,
            says=named,
        )
        for named, message in (
            ("audio", {"audio": {"id": "a", "data": "UklGRg==", "transcript": "Hello", "expires_at": 1}}),
            ("images", {"images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}),
            (
                "custom tool call",
                {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "sql", "input": "x"}}]},
            ),
            (
                "image_url content",
                {"content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
            ),
            ("output_audio content", {"content": [{"type": "output_audio", "data": "UklGRg=="}]}),
        )
        for reply in (completion, lambda message: stream(chunk(message), STOP))
    ),
    *(
        seen(
            "LiteLLM",
            f"status {status} with an event stream",
            Scripted(
                b'data: {"error": {"message": "no deployment", "code": "500"}}\n\ndata: [DONE]\n\n',
                status=status,
                content_type="text/event-stream",
            ),
            error=ModelHttpError,
            says="no deployment",
            status=status,
        )
        for status in (400, 500)
    ),
    seen(
        "any",
        "an event named error with a bad status",
        Scripted(b'event: error\ndata: {"message": "no deployment"}\n\n', status=503),
        error=ModelHttpError,
        says="no deployment",
    ),
]
