"""The demo model plans calls of arbitrary tools by its rules, and answers prompts without tools."""

import json
from typing import Any

import pytest

from toolbox.chat import (
    AiMessage,
    ChatRequest,
    CompleteResponse,
    Message,
    ResponseFormat,
    SystemMessage,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from toolbox.chat_streams import stream_of
from toolbox.demo import DemoChatModel

pytestmark = pytest.mark.anyio

STRING = {"type": "string"}
NUMBER = {"type": "number"}
INTEGER = {"type": "integer"}
DATE = {"type": "string", "format": "date"}
AMOUNT = {"anyOf": [{"type": "number"}, {"type": "string"}]}
MOMENT = {"type": "string", "format": "date-time"}
UNIT = {"type": "string", "enum": ["celsius", "kelvin"]}


def spec(name: str, required: dict[str, Any] | None = None, **optional: Any) -> ToolSpecification:
    required = required or {}
    return ToolSpecification(
        name,
        parameters={"type": "object", "properties": {**required, **optional}, "required": list(required)},
    )


class Run:
    """Asks the model until it answers; `results` has the text that each tool gives."""

    def __init__(self, question: str, tools: list[ToolSpecification], results: dict[str, str]) -> None:
        self.messages: list[Message] = [UserMessage(question)]
        self.tools, self.results = tools, results
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def answer(self) -> str:
        model = DemoChatModel()
        for _ in range(len(self.tools) + 1):
            reply = (await model.chat(ChatRequest(self.messages, self.tools))).ai_message
            self.messages.append(reply)
            if not reply.tool_execution_requests:
                return reply.text or ""
            [call] = reply.tool_execution_requests
            self.calls.append((call.name, json.loads(call.arguments)))
            self.messages.append(ToolExecutionResultMessage.of(call, self.results[call.name]))
        raise AssertionError("the model never answered")


async def test_a_chain_of_tools_is_called_in_order() -> None:
    run = Run(
        "Weather in Valence?",
        [
            spec("extract_city", {"question": STRING}),
            spec("find_city", {"name": STRING}),
            spec("forecast", {"latitude": NUMBER, "longitude": NUMBER}, timezone=STRING),
        ],
        {
            "extract_city": "Valence",
            "find_city": '[{"place": {"latitude": 44.9, "longitude": 4.9, "timezone": "Europe/Paris"}}]',
            "forecast": "Sunny, 21 degrees",
        },
    )

    answer = await run.answer()

    assert run.calls == [
        ("extract_city", {"question": "Weather in Valence?"}),
        ("find_city", {"name": "Valence"}),
        ("forecast", {"latitude": 44.9, "longitude": 4.9, "timezone": "Europe/Paris"}),
    ]
    assert "Sunny, 21 degrees" in answer


async def test_the_newest_result_that_fits_the_type_wins() -> None:
    run = Run(
        "Go",
        [spec("old", {"q": STRING}), spec("new"), spec("newest"), spec("use", {"id": INTEGER})],
        {"old": '{"id": 1}', "new": '{"id": 2}', "newest": '{"id": "three"}', "use": "ok"},
    )

    await run.answer()

    assert run.calls[-1] == ("use", {"id": 2})


async def test_the_users_text_fills_all_text_parameters_of_one_tool() -> None:
    run = Run(
        "Ada",
        [spec("one", {"a": STRING, "b": STRING}), spec("two", {"c": STRING})],
        {"one": "7", "two": "never"},
    )

    answer = await run.answer()

    assert run.calls == [("one", {"a": "Ada", "b": "Ada"})]
    assert "7" in answer


async def test_a_plain_text_result_is_used_once_and_before_the_users_text() -> None:
    run = Run(
        "Go",
        [
            spec("make"),
            spec("first", {"text": STRING}),
            spec("second", {"text": STRING}),
            spec("third", {"text": STRING}),
        ],
        {"make": "made", "first": '{"n": 1}', "second": "12", "third": "true"},
    )

    await run.answer()

    assert run.calls[1:] == [("first", {"text": "made"}), ("second", {"text": "Go"})]


async def test_results_are_used_before_the_users_text_and_objects_only_come_from_results() -> None:
    unit = {"type": "string", "enum": ["celsius", "kelvin"]}
    place = {"type": "object", "properties": {"lat": NUMBER}, "required": ["lat"]}
    tools = [
        spec("ask"),
        spec("by_unit", {"unit": unit}),
        spec("by_place", {"place": place}),
        spec("by_list", {"tags": {"type": "array", "items": STRING}}),
        spec("by_flag", {"flag": {"type": "boolean"}}),
    ]
    run = Run(
        "in kelvin, 3 times",
        tools,
        {
            "ask": '{"unit": "kelvin", "x": [{"place": {"lon": 1}}, {"place": {"lat": 2}}], "tags": ["a"], "flag": 1}',
            "by_unit": "Success",
            "by_place": "1",
            "by_list": "[]",
        },
    )

    await run.answer()

    assert run.calls == [
        ("ask", {}),
        ("by_unit", {"unit": "kelvin"}),
        ("by_place", {"place": {"lat": 2}}),
        ("by_list", {"tags": ["a"]}),
    ]


@pytest.mark.parametrize(
    ("question", "parameters", "arguments"),
    [
        ("What is 17 times 23?", {"a": INTEGER, "b": INTEGER}, {"a": 17, "b": 23}),
        ("What is the square of 413?", {"number": INTEGER}, {"number": 413}),
        ("What is 17 times 23?", {"a": NUMBER, "b": NUMBER, "c": NUMBER}, None),
        ("Add -5 and 2.5, please.", {"a": NUMBER, "b": NUMBER}, {"a": -5, "b": 2.5}),
        ("From 10 to -3", {"a": INTEGER, "b": INTEGER}, {"a": 10, "b": -3}),
        ("Pay 1,250.50 or 1,000", {"a": NUMBER, "b": NUMBER}, {"a": 1250.5, "b": 1000}),
        ("Half of 2.5 and 4", {"n": INTEGER}, {"n": 4}),
        ("The 2.0 of it", {"n": INTEGER}, {"n": 2}),
        ("Between 1 and 100", {"n": {"type": "integer", "minimum": 50}}, {"n": 100}),
        ("Price 19.99", {"price": {"anyOf": [NUMBER, STRING]}}, {"price": 19.99}),
        ("Pay -7.50", {"amount": {"anyOf": [NUMBER, STRING]}}, {"amount": "-7.50"}),
        ("Pay 7.50 and 1,000.00", {"a": AMOUNT, "b": AMOUNT}, {"a": "7.50", "b": "1000.00"}),
        ("Age 7", {"age": {"anyOf": [{"type": "null"}, INTEGER]}}, {"age": 7}),
        ("On 2026-12-24 for 3 nights", {"n": INTEGER, "day": DATE}, {"n": 3, "day": "2026-12-24"}),
        ("On 2026-12-24", {"n": INTEGER}, None),
        ("2026-12-24 to 2026-12-31", {"start": DATE, "end": DATE}, {"start": "2026-12-24", "end": "2026-12-31"}),
        ("On 2026-02-30", {"day": DATE}, None),
        ("At 2026-12-24T18:30", {"at": MOMENT, "n": INTEGER}, None),
        ("At 2026-12-24T18:30:00Z", {"at": MOMENT}, {"at": "2026-12-24T18:30:00Z"}),
        ("in Kelvin or celsius", {"unit": UNIT}, {"unit": "celsius"}),
        ("in KELVIN", {"unit": UNIT}, {"unit": "kelvin"}),
        ("in kelvins", {"unit": UNIT}, None),
        ("3 degrees celsius", {"unit": UNIT, "n": INTEGER}, {"unit": "celsius", "n": 3}),
        ("level 2", {"level": {"type": "integer", "enum": [1, 2]}}, {"level": 2}),
        ("9" * 5000, {"n": INTEGER}, None),
        ("no number, v2 and x17", {"n": INTEGER}, None),
        ("Is it 5?", {"flag": {"type": "boolean"}}, None),
    ],
)
async def test_numbers_dates_and_enums_come_from_the_users_text(
    question: str, parameters: dict[str, Any], arguments: dict[str, Any] | None
) -> None:
    run = Run(question, [spec("work", parameters)], {"work": "Success"})

    await run.answer()

    assert run.calls == ([] if arguments is None else [("work", arguments)])


async def test_a_number_of_the_users_text_is_used_once() -> None:
    tools = [spec("first", {"a": INTEGER}), spec("second", {"a": INTEGER}), spec("third", {"a": INTEGER})]
    run = Run("Take 7 and 8", tools, dict.fromkeys(("first", "second", "third"), "Success"))

    await run.answer()

    assert run.calls == [("first", {"a": 7}), ("second", {"a": 8})]


async def test_optional_parameters_and_references_are_supported() -> None:
    schema = {
        "type": "object",
        "$defs": {"Size": {"enum": ["S", "M"], "type": "string"}},
        "properties": {"size": {"$ref": "#/$defs/Size"}, "note": {"anyOf": [STRING, {"type": "null"}]}},
        "required": ["size", "note"],
    }
    run = Run(
        "Hello", [spec("ask"), ToolSpecification("order", parameters=schema)], {"ask": '{"size": "M"}', "order": "1"}
    )

    await run.answer()

    assert run.calls[-1] == ("order", {"size": "M", "note": "Hello"})


async def test_values_of_a_failed_tool_are_not_used() -> None:
    model, find = DemoChatModel(), spec("find", {"text": STRING})
    call = (await model.chat(ChatRequest([UserMessage("Atlantis")], [find]))).ai_message.tool_execution_requests[0]
    failed = ToolExecutionResultMessage(call.id, "find", "no such city", is_error=True)

    reply = await model.chat(
        ChatRequest(
            [UserMessage("Atlantis"), AiMessage(tool_execution_requests=[call]), failed],
            [find, spec("go", {"x": STRING})],
        )
    )

    assert "sorry" in (reply.ai_message.text or "")
    assert "no such city" in (reply.ai_message.text or "")


@pytest.mark.parametrize("nothing", ["[]", "null", '{"results": []}', ""])
async def test_an_empty_result_is_reported_politely(nothing: str) -> None:
    run = Run("Atlantis", [spec("find", {"text": STRING})], {"find": nothing})

    answer = await run.answer()

    assert "sorry" in answer
    assert "found nothing" in answer


async def test_a_second_question_starts_with_a_new_plan() -> None:
    run = Run("One", [spec("find", {"text": STRING})], {"find": "first"})
    await run.answer()
    run.messages.append(UserMessage("Two"))

    await run.answer()

    assert run.calls == [("find", {"text": "One"}), ("find", {"text": "Two"})]
    assert (
        len({call.id for each in run.messages if isinstance(each, AiMessage) for call in each.tool_execution_requests})
        == 2
    )


async def test_the_demo_model_is_deterministic_and_streams_its_reply() -> None:
    request = ChatRequest([UserMessage("Hello there")])
    model = DemoChatModel()

    events = [event async for event in stream_of(model, request)]

    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response == await model.chat(request)
    assert len(events) > 3


async def test_tool_choice_is_respected() -> None:
    tools = [spec("count", {"n": INTEGER}), spec("say", {"text": STRING})]
    model = DemoChatModel()

    async def calls(choice: str | None) -> list[str]:
        reply = await model.chat(ChatRequest([UserMessage("Hi")], tools, tool_choice=choice))
        return [call.name for call in reply.ai_message.tool_execution_requests]

    assert await calls("none") == []
    assert await calls("count") == ["count"]
    assert await calls("required") == ["say"]


EXTRACTOR = "You extract the city a question asks about; answer with its name only"


@pytest.mark.parametrize(
    ("question", "city"),
    [
        ("What is the weather tomorrow in Valence?", "Valence"),
        ("Will it rain in São Paulo on Monday?", "São Paulo"),
        ("What will the weather be in New York next week?", "New York"),
        ("How warm is it in Rio de Janeiro today", "Rio de Janeiro"),
        ("Is London sunny today?", "London"),
        ("Tokyo weather?", "Tokyo"),
        ("what's the weather in paris tomorrow?", "Paris"),
        ("Weather for Aix-en-Provence please", "Aix-en-Provence"),
        ("How is it in St. Louis?", "St. Louis"),
        ("What is London's weather on Tuesday?", "London"),
        ("I fly from Oslo on Friday, how is the weather at Kuala Lumpur in May?", "Kuala Lumpur"),
        ("What is the weather in Ciudad de México tomorrow?", "Ciudad de México"),
        ("What is the weather in 東京?", "東京"),
        ("What's the weather in the city of Bath tomorrow?", "Bath"),
        ("How hot is it in İzmir?", "İzmir"),
        ("Valence", "Valence"),
        ("Question: Oslo?", "Oslo"),
        ("The weather in Oslo: is it nice?", "Oslo"),
        ("What is the weather?", "unknown"),
    ],
)
async def test_a_city_is_extracted(question: str, city: str) -> None:
    reply = await DemoChatModel().chat(ChatRequest([SystemMessage(EXTRACTOR), UserMessage(question)]))

    assert reply.ai_message.text == city


@pytest.mark.parametrize(
    "instruction",
    [
        "Extract the city mentioned by the user. Reply with the city only.",
        "Answer with the city name only.",
        "Which city is the question about?",
    ],
)
async def test_other_wordings_of_the_instruction_are_understood(instruction: str) -> None:
    messages = [SystemMessage(instruction), UserMessage("Will it rain in Porto on Monday?")]

    assert (await DemoChatModel().chat(ChatRequest(messages))).ai_message.text == "Porto"


QUARKUS = """You are given one question and you have to extract city name from it
Only reply the city name if it exists or reply 'unknown_city' if there is no city name in question

Here is the question: {question}"""


async def test_the_prompt_of_the_quarkus_sample_is_understood() -> None:
    async def ask(question: str) -> str | None:
        return (
            await DemoChatModel().chat(ChatRequest([UserMessage(QUARKUS.format(question=question))]))
        ).ai_message.text

    assert await ask("What is the weather tomorrow in Nice?") == "Nice"
    assert await ask("What is the weather tomorrow?") == "unknown_city"


async def test_a_response_format_is_filled() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": STRING,
            "days": INTEGER,
            "unit": {"enum": ["celsius", "kelvin"]},
            "tags": {"type": "array", "items": STRING},
            "note": {"anyOf": [STRING, {"type": "null"}]},
        },
        "required": ["city", "days", "unit", "tags"],
    }
    question = UserMessage("The weather in Oslo for 3 days, in kelvin")

    reply = await DemoChatModel().chat(ChatRequest([question], response_format=ResponseFormat("Ask", schema)))

    value = json.loads(reply.ai_message.text or "")
    assert (value["city"], value["days"], value["unit"]) == ("Oslo", 3, "kelvin")
    assert all(isinstance(each, str) for each in value["tags"])


async def test_a_schema_shown_in_the_prompt_is_filled() -> None:
    shown = '{"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}'
    messages = [SystemMessage(EXTRACTOR), UserMessage(f"Weather in Oslo?\nAnswer with JSON of this schema:\n{shown}")]

    reply = await DemoChatModel().chat(ChatRequest(messages))

    assert json.loads(reply.ai_message.text or "") == {"value": "Oslo"}


@pytest.mark.parametrize("text", ["_" * 200_000, "here is " * 25_000, "é" * 200_000], ids=["_", "here is", "é"])
async def test_long_texts_are_searched_quickly(text: str) -> None:
    """With a cost that grows as the square, each of them would take minutes."""
    schema = {
        "type": "object",
        "properties": {"email": {"type": "string", "format": "email"}, "city": {"type": "string"}},
    }
    request = ChatRequest([UserMessage(text)], response_format=ResponseFormat("answer", schema))

    assert (await DemoChatModel().chat(request)).ai_message.text
