"""Unions of object types in answers: the `kind` decides which member an answer is."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Protocol

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypeAliasType, TypedDict

from toolbox import IllegalConfigurationError, OutputParsingError, Result, create_ai_service, register_ai_service
from toolbox.guardrails import GuardrailResult, OutputGuardrail, OutputGuardrailRequest, output_guardrails
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Rewrite(BaseModel):
    feedback: str


class Ok(BaseModel):
    pass


class Flight(BaseModel):
    number: str
    price: float


@dataclass
class NoFlightFound:
    reason: str = ""


class Note(TypedDict):
    text: str


def reply(mode: str, text: str) -> Any:
    return tool_call("final_answer", text) if mode == "tool" else text


MODES = ["schema", "tool", "prompt"]


def service(returns: Any, mode: Any = None, **options: Any) -> Any:
    class Asking(Protocol):
        async def ask(self, text: str) -> Any: ...

    Asking.ask.__annotations__["return"] = returns
    return Asking, {"output_mode": mode, **options}


async def ask(returns: Any, *replies: Any, mode: Any = None, **options: Any) -> Any:
    asking, given = service(returns, mode, **options)
    return await create_ai_service(asking, chat_model=ScriptedChatModel(list(replies)), **given).ask("x")


@pytest.mark.parametrize("mode", MODES)
async def test_the_kind_decides_which_member_of_a_union_an_answer_is(mode: Any) -> None:
    text = '{"value": {"kind": "Rewrite", "feedback": "shorter"}}'
    assert await ask(Rewrite | Ok, reply(mode, text), mode=mode) == Rewrite(feedback="shorter")
    assert await ask(Rewrite | Ok, reply(mode, '{"value": {"kind": "ok"}}'), mode=mode) == Ok()
    assert await ask(Result[Rewrite | Ok], reply(mode, '{"kind": "OK"}'), mode=mode) == await ask(
        Result[Rewrite | Ok], reply(mode, '{"kind": "OK"}'), mode=mode
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "wrong",
    [
        '{"value": {"comments": "shorter"}}',
        '{"value": {"kind": "Rewrite", "comments": "shorter"}}',
        '{"value": {"kind": "Rewritten", "feedback": "shorter"}}',
        "I think {} is fine",
        '```json\n{"kind": "Rewrite"}\n```',
    ],
)
async def test_a_wrong_member_of_a_union_is_asked_again_and_never_another_type(mode: Any, wrong: str) -> None:
    right = reply(mode, '{"value": {"kind": "Rewrite", "feedback": "x"}}')

    assert await ask(Rewrite | Ok, reply(mode, wrong), right, mode=mode) == Rewrite(feedback="x")
    with pytest.raises(OutputParsingError):
        await ask(Rewrite | Ok, reply(mode, wrong), mode=mode, max_output_retries=0)


@pytest.mark.parametrize(
    "returns", [Flight | NoFlightFound, Flight | NoFlightFound | str, Flight | NoFlightFound | None]
)
@pytest.mark.parametrize(
    "wrong",
    [
        '{"kind": "Flight", "number": "LH1", "price": "cheap"}',
        '{"value": {"number": "LH1", "price": "cheap"}}',
        '```json\n{"number": "LH1", "price": "cheap"}\n```',
        'I found {"number": "LH1", "price": "cheap"}',
        '{"kind": "Flight", "number": "LH1", "price": ',
    ],
)
async def test_a_flight_with_a_bad_price_never_becomes_another_member_or_a_text(returns: Any, wrong: str) -> None:
    with pytest.raises(OutputParsingError):
        await ask(returns, wrong, max_output_retries=0)


@pytest.mark.parametrize(
    ("returns", "text", "value"),
    [
        (Flight | NoFlightFound, '{"number": "LH1", "price": 3}', Flight(number="LH1", price=3)),
        (Flight | NoFlightFound, '{"reason": "full"}', NoFlightFound("full")),
        (Rewrite | Ok, '{"value": {}}', Ok()),
        (Flight | NoFlightFound | None, "null", None),
        (Flight | NoFlightFound | None, '{"value": null}', None),
        (Flight | NoFlightFound | str, "There is none.", "There is none."),
        (Flight | NoFlightFound | str, '{"kind": "NoFlightFound"}', NoFlightFound()),
        (Flight | Note, '{"kind": "note", "text": "a"}', {"kind": "Note", "text": "a"}),
        (list[Rewrite | Ok], '[{"kind": "Ok"}, {"kind": "Rewrite", "feedback": "a"}]', [Ok(), Rewrite(feedback="a")]),
        (list[Rewrite] | Ok, '{"value": [{"kind": "Rewrite", "feedback": "a"}]}', [Rewrite(feedback="a")]),
        (dict[str, Rewrite | Ok], '{"a": {"kind": "Ok"}}', {"a": Ok()}),
        (TypeAliasType("Review", Rewrite | Ok), '{"kind": "Ok"}', Ok()),  # type: ignore[misc]  # not a module's alias
    ],
)
async def test_unions_are_read_with_a_kind_or_if_one_member_takes_all_fields(
    returns: Any, text: str, value: object
) -> None:
    assert await ask(returns, text) == value


async def test_items_of_a_stream_and_their_kinds() -> None:
    class Reviews(Protocol):
        def ask(self, text: str) -> AsyncIterator[Rewrite | Ok]: ...

    good = '[{"kind": "Ok"}, {"kind": "Rewrite", "feedback": "a"}]'
    reviews = create_ai_service(Reviews, chat_model=ScriptedChatModel([good, '[{"comments": "a"}]']))

    assert [each async for each in reviews.ask("x")] == [Ok(), Rewrite(feedback="a")]
    with pytest.raises(OutputParsingError):
        [each async for each in reviews.ask("x")]


async def test_the_schema_of_a_union_requires_the_name_of_the_member() -> None:
    asking, _ = service(Rewrite | Ok, "schema")
    model = ScriptedChatModel(['{"kind": "Ok"}'])
    await create_ai_service(asking, chat_model=model, output_mode="schema").ask("x")

    sent = model.requests[0].response_format
    assert sent is not None
    members = sent.schema["properties"]["value"]["anyOf"]
    assert [each["properties"]["kind"]["const"] for each in members] == ["Rewrite", "Ok"]
    assert [each["required"] for each in members] == [["kind", "feedback"], ["kind"]]


class Cat(BaseModel):
    kind: Literal["cat", "kitten"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    legs: int = 4


async def test_own_fields_named_kind_are_used_if_all_members_have_one() -> None:
    assert await ask(Cat | Dog, '{"kind": "KITTEN"}') == Cat(kind="kitten")
    assert await ask(Cat | Dog, '{"kind": "dog", "legs": 3}') == Dog(legs=3)


class Plain(BaseModel):
    kind: str


class Aliased(BaseModel):
    sort: str = Field(alias="kind")


class OtherDog(BaseModel):
    kind: Literal["dog"]


def other(name: str) -> Any:
    return type(name, (BaseModel,), {"__module__": __name__})


@pytest.mark.parametrize(
    "returns", [Cat | Ok, Plain | Ok, Aliased | Ok, Dog | OtherDog, Ok | other("Ok"), list[Cat | Ok], Result[Cat | Ok]]
)
def test_unclear_kinds_are_problems_that_name_the_discriminator(returns: Any) -> None:
    asking, _ = service(returns)

    with pytest.raises(IllegalConfigurationError) as caught:
        create_ai_service(asking, chat_model=ScriptedChatModel([]))

    [problem] = caught.value.problems
    assert "discriminator" in problem.fix
    assert problem.where == "Asking.ask"


async def test_unions_with_a_discriminator_and_with_one_object_type_stay_as_they_are() -> None:
    class Left(BaseModel):
        side: Literal["left"]

    class Right(BaseModel):
        side: Literal["right"]

    assert await ask(Annotated[Left | Right, Field(discriminator="side")], '{"side": "right"}') == Right(side="right")
    assert await ask(Flight | None, '{"value": {"number": "LH1", "price": 3}}') == Flight(number="LH1", price=3)
    assert await ask(Flight | str, "none") == "none"


async def test_guardrails_read_the_kind_in_the_text_and_give_a_member_or_a_dict() -> None:
    seen: list[tuple[str, object]] = []

    class Softer(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            seen.append((request.text, request.value))
            given = Ok() if len(seen) == 1 else {"kind": "Rewrite", "feedback": "please"}
            return self.success_with(given)

    @register_ai_service
    @output_guardrails(Softer())
    class Review(Protocol):
        async def ask(self, text: str) -> Rewrite | Ok: ...

    review = create_ai_service(Review, chat_model=ScriptedChatModel(['```\n{"feedback": "no"}\n```'] * 2))

    assert await review.ask("x") == Ok()
    assert await review.ask("x") == Rewrite(feedback="please")
    assert [json.loads(text) for text, _ in seen] == [{"kind": "Rewrite", "feedback": "no"}] * 2
    assert seen[0][1] == Rewrite(feedback="no")


# --- names and values


class Mood(Enum):
    VERY_GOOD = "+"
    BAD = "so-so"


class Feeling(BaseModel):
    mood: Mood
    colour: Literal["dark blue", "red"] = "red"


class Priority(Enum):
    LOW = 1
    HIGH = 2


@pytest.mark.parametrize(
    ("returns", "text", "value"),
    [
        (Mood, '{"value": "very_good"}', Mood.VERY_GOOD),
        (Mood, '{"value": "Very-Good"}', Mood.VERY_GOOD),
        (Mood, "very good", Mood.VERY_GOOD),
        (Mood, "[SO SO]", Mood.BAD),
        (Mood | None, '{"value": "bad"}', Mood.BAD),
        (Feeling, '{"mood": "VERY GOOD", "colour": "Dark_Blue"}', Feeling(mood=Mood.VERY_GOOD, colour="dark blue")),
        (list[Feeling], '[{"mood": "bad"}]', [Feeling(mood=Mood.BAD)]),
        (dict[Mood, int], '{"BAD": 3}', {Mood.BAD: 3}),
        (list[Mood], "- bad\n- very good", [Mood.BAD, Mood.VERY_GOOD]),
        (Literal["dark blue", "red"], "DARK-BLUE", "dark blue"),
        (Priority, '{"value": "high"}', Priority.HIGH),
        (Priority, "2", Priority.HIGH),
        (Feeling | Ok, '{"kind": "feeling", "mood": "bad"}', Feeling(mood=Mood.BAD)),
    ],
)
@pytest.mark.parametrize("mode", MODES)
async def test_names_and_values_of_enums_and_literals_are_recognized_anywhere(
    returns: Any, text: str, value: object, mode: Any
) -> None:
    if mode == "tool" and not text.startswith("{"):
        text = (
            json.dumps({"value": text})
            if not text.startswith(("[", "-"))
            else json.dumps({"value": value}, default=str)
        )
        if "Mood" in text or "Feeling" in text:
            return
    assert await ask(returns, reply(mode, text), mode=mode, max_output_retries=0) == value


class Close(Enum):
    A_B = "x"
    a_b = "y"
    c = "A-b"
    d = "Q"
    q = "w"


@pytest.mark.parametrize(
    ("text", "value"),
    [("x", Close.A_B), ("a b", Close.c), ("A_B", Close.c), ("q", Close.d), ("W", Close.q)],
)
async def test_values_come_before_names(text: str, value: Close) -> None:
    assert await ask(Close, json.dumps({"value": text}), max_output_retries=0) == value


class Doubtful(Enum):
    UP = "one-way"
    up = "one way"


@pytest.mark.parametrize("text", ["One_Way", "Up"])
async def test_a_text_that_fits_several_members_is_rejected(text: str) -> None:
    with pytest.raises(OutputParsingError):
        await ask(Doubtful, json.dumps({"value": text}), max_output_retries=0)


# --- blank replies


@pytest.mark.parametrize(
    "returns", [list[int], list[str], set[int], frozenset[str], tuple[int, ...], list[Ok], Result[list[int]]]
)
@pytest.mark.parametrize("blank", ["", " \n", "```\n```", "```json\n\n```"])
@pytest.mark.parametrize("mode", MODES)
async def test_blank_replies_are_not_lists(returns: Any, blank: str, mode: Any) -> None:
    with pytest.raises(OutputParsingError):
        await ask(returns, reply(mode, blank), blank, mode=mode, max_output_retries=1)
