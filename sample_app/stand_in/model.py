"""A stand-in for a language model: it answers for all agents of the sample with patterns, without understanding.

The demo model of toolbox fills arguments by their names. This one also recognizes intentions, such as cancelling a
booking or choosing an expert, by words in the question. Not here: the tools.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    DemoChatModel,
    FinishReason,
    Message,
    ToolExecutionResultMessage,
    UserMessage,
)
from toolbox.testing import tool_call

_NAME = re.compile(r"\b(?:[Ii] am|[Ii]'m|[Nn]ame is|[Tt]his is|[Oo]f|[Ff]or)\s+([A-Z]\w+)\s+([A-Z]\w+)")
_NUMBER = re.compile(r"\b(?:booking|number|no\.?)\s*#?(\d+)", re.IGNORECASE)
_STAY = re.compile(r"\b(compact|van|convertible)\b.*?(\d{4}-\d{2}-\d{2}).*?(\d{4}-\d{2}-\d{2})", re.IGNORECASE)
_GROUP = re.compile(r"\b(compact|van|convertible)\b", re.IGNORECASE)
_DAY = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")

_EXPERTS: Mapping[str, re.Pattern[str]] = {
    "medical_request": re.compile(r"\b(leg|arm|pain|ill|fever|doctor|broke my|sick|cough|headache)\b", re.IGNORECASE),
    "legal_request": re.compile(r"\b(contract|sue|landlord|law|court|fired|rights?|fine|lawyer)\b", re.IGNORECASE),
    "technical_request": re.compile(r"\b(computer|server|wifi|program|error|phone|printer|install)\b", re.IGNORECASE),
}


class StandInModel(DemoChatModel):
    """Replies with patterns for bookings and experts, and like the demo model otherwise."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the next tool call or the answer."""
        offered = {each.name for each in request.tool_specifications}
        if "cancel_booking" in offered:
            return await self._at_the_desk(request)
        if "medical_request" in offered:
            return await self._route(request)
        reply = await super().chat(request)
        if "forecast" in offered and not reply.ai_message.has_tool_execution_requests:
            return _says(_forecast_in_words(request.messages) or reply.ai_message.text or "")
        return reply

    async def _at_the_desk(self, request: ChatRequest) -> ChatResponse:
        if isinstance(request.messages[-1], ToolExecutionResultMessage):
            return await super().chat(replace(request, tool_specifications=()))
        said = list(_said(request.messages))
        name = next((found for text in said if (found := _NAME.search(text))), None)
        if name is None:
            return _says("Gladly. May I have your first and your last name?")
        customer = {"first_name": name[1], "last_name": name[2]}
        question = said[0]
        stay, number = _STAY.search(question), _NUMBER.search(question)
        if stay is not None:
            days = {"car_group": stay[1].lower(), "date_from": stay[2], "date_to": stay[3]}
            return _calls("book_car", {**customer, **days})
        if (wish := _wish_in(question)) and number is None:
            return _calls("plan_reservation", wish)
        if number is not None:
            what = "cancel_booking" if re.search(r"\bcancel", question, re.IGNORECASE) else "find_booking"
            return _calls(what, {"booking_id": int(number[1]), **customer})
        return _calls("list_bookings", customer)

    async def _route(self, request: ChatRequest) -> ChatResponse:
        last = request.messages[-1]
        if isinstance(last, ToolExecutionResultMessage):
            return _says(last.text)
        # The user's question, without the router's instructions.
        question = next(_said(request.messages)).rpartition("The user request is:")[2].strip()
        for expert, words in _EXPERTS.items():
            if words.search(question):
                return _calls(expert, {"request": question})
        return _says("I am sorry, I know no expert for that: only medical, legal and technical ones.")


def _wish_in(question: str) -> dict[str, str]:
    """Return the car group and the days that a question names."""
    group, days = _GROUP.search(question), _DAY.findall(question)
    named = {} if group is None else {"car_group": group[1].lower()}
    return {**named, **dict(zip(("date_from", "date_to"), days, strict=False))}


def _forecast_in_words(messages: Sequence[Message]) -> str | None:
    """Return the forecast as sentences: for the day that the question names, else for today and tomorrow."""
    results = {each.tool_name: each for each in messages if isinstance(each, ToolExecutionResultMessage)}
    if "forecast" not in results or any(each.is_error for each in results.values()):
        return None
    place = json.loads(results["find_city"].text)["results"][0]
    days = json.loads(results["forecast"].text)["days"]
    question = next(_said(messages)).lower()
    asked = [day for day in days if day["day"].lower() in question] or days[:2]
    where = ", ".join(each for each in (place["name"], place.get("country")) if each)
    return "\n".join(f"{where}, {day['day']} ({day['date']}): {_day_in_words(day)}" for day in asked)


def _day_in_words(day: Mapping[str, Any]) -> str:
    rain = f"{day['precipitation']} mm of precipitation" if day["precipitation"] else "no precipitation"
    temperature = f"{day['min_temperature']} to {day['max_temperature']} °C"
    return f"{day['weather']}, {temperature}, {rain}, wind up to {day['wind_speed']} km/h."


def _said(messages: Sequence[Message]) -> Iterator[str]:
    """Return the texts of the user messages, the newest first."""
    return (message.text for message in reversed(messages) if isinstance(message, UserMessage))


def _says(text: str) -> ChatResponse:
    return ChatResponse(AiMessage(text), finish_reason=FinishReason.STOP)


def _calls(tool: str, arguments: Mapping[str, object]) -> ChatResponse:
    asked = AiMessage(tool_execution_requests=(tool_call(tool, arguments),))
    return ChatResponse(asked, finish_reason=FinishReason.TOOL_EXECUTION)
