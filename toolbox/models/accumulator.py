"""Assembles a reply from its fragments: text, reasoning, tool calls with names, arguments and ids, and details.

The details are token counts, and attributes for all other fields. The rules follow what servers send in practice,
including common mistakes. No I/O. Not here: the names of fields (`chat_wire`, `responses_wire`), decoding arguments
(`tools.codec`), adding up token counts (`chat.TokenUsage`).
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic_core import from_json, to_json

from ..chat import (
    AiMessage,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    StreamEvent,
    TokenUsage,
    ToolExecutionRequest,
)
from ..errors import ModelProtocolError, ModelRefusedError, ModelTruncatedError
from ..json_text import arguments_text, compact_json, parse_json, strict_arguments, whole_characters, whole_json
from .reply_endings import error_of_ending, finish_reason_of, is_malformed_call

_LASTING = (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
LONGEST_ID = 64
LARGEST_MESSAGE_ATTRIBUTES = 2**16
"""Bytes of JSON in a message's attributes. The limit is low because conversations are stored. The response keeps the
rest."""
LARGEST_RESPONSE_ATTRIBUTES = 2**22
"""Bytes of JSON in a response's attributes, which are not stored."""
LEFT_OUT = "left_out"
"""The attribute of a response with the names of attributes that were too large."""


@dataclass(slots=True, eq=False)
class PartialCall:
    """A tool call that may still be incomplete."""

    position: int
    id: str | None = None
    name: str | None = None
    fragments: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    complete: ToolExecutionRequest | None = None

    @property
    def arguments(self) -> str:
        """The argument text received so far."""
        return "".join(self.fragments)


class ReplyAccumulator:
    """Receives the fragments of one reply and creates its stream events; `finish` returns the whole reply.

    Tool calls come in one of three ways. `whole_call` takes a call that arrives at once: in a reply that is not
    streamed, or from a server that streams whole calls. `call_piece` takes a fragment, and finds its call by index, id
    and name; `finish` completes all calls. If the server says before that a call is complete, also call `end_call`,
    with the arguments if the server repeats them: the tool then starts while the rest of the reply arrives. Never call
    it for a call that may be cut. Set `ends_in_call` if the last part is a call whose arguments the server has parsed:
    it closes their JSON at the token limit, so that only this tells that the call is cut.

    `tool_names` are the offered tools; they are needed for names that arrive in fragments or with the prefix
    `functions.`. `wants_json`: the text is a structured answer, which is useless if it is cut. `ending`: the server's
    own finish reason. `attributes` are sent back to the server. `of_message` and `of_response` are others.
    `unread` names parts that may be the answer but are not supported.
    """

    def __init__(self, tool_names: Collection[str] = (), wants_json: bool = False) -> None:
        self.events: list[StreamEvent] = []
        self.finish_reason: FinishReason | None = None
        self.ending: str | None = None
        self.ends_in_call = False
        self.usage: TokenUsage | None = None
        self.id: str | None = None
        self.model: str | None = None
        self.attributes: dict[str, Any] = {}
        self.of_message: dict[str, Any] = {}
        self.of_response: dict[str, Any] = {}
        self.unread: list[str] = []
        self._tool_names = tool_names
        self._wants_json = wants_json
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._held: dict[str, str] = {}  # a high surrogate by channel
        self._calls: list[PartialCall] = []
        self._at_index: dict[Hashable, list[PartialCall]] = {}
        self._ids: set[str] = set()
        self._counts: dict[str, Any] = {}  # by the server's names

    def take_events(self) -> list[StreamEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    # --- fragments

    def text(self, piece: str) -> None:
        """Add a fragment of the answer."""
        if not piece.isascii() or "text" in self._held:
            piece = self._join_surrogates("text", piece)
        if piece:
            self._text.append(piece)
            self.events.append(PartialResponse(piece))

    def reasoning(self, piece: str) -> None:
        """Add a fragment of the reasoning."""
        if not piece.isascii() or "reasoning" in self._held:
            piece = self._join_surrogates("reasoning", piece)
        if piece:
            self._reasoning.append(piece)
            self.events.append(PartialReasoning(piece))

    def refusal(self, piece: str) -> None:
        """Add a fragment of a refusal."""
        self._refusal.append(piece)

    def end(self, word: str) -> None:
        """Note the server's word for the end of the reply. Raises `ModelHttpError` if the server cannot complete it."""
        if (error := error_of_ending(word)) is not None:
            raise error
        self.ending = word
        # Some servers first report that the reply was cut, then that it stopped.
        if self.finish_reason not in _LASTING:
            self.finish_reason = finish_reason_of(word) or FinishReason.OTHER

    @property
    def is_cut(self) -> bool:
        """Return True if a token limit ended the reply."""
        return self.finish_reason is FinishReason.LENGTH

    @property
    def was_stopped(self) -> bool:
        """Return True if a token limit or a filter ended the reply."""
        return self.finish_reason in _LASTING

    def call_piece(self, index: object, call_id: object, name: object, arguments: object) -> PartialCall:
        """Add a fragment of a call, and return the call it belongs to: a known or a new one."""
        key, identity, fragment = key_of(index), _read_fragment(call_id), self._read_name(name)
        call = self._find_continued_call(key, identity, fragment, arguments) or self._open_call(key)
        self._add_fragment(call, identity, fragment, arguments)
        return call

    def whole_call(self, call_id: object, name: object, arguments: object) -> PartialCall:
        """Add a call of a reply that is not streamed; always a new call."""
        call = self._open_call(None)
        self._add_fragment(call, _read_fragment(call_id), self._read_name(name), arguments)
        return call

    def end_call(self, call: PartialCall, arguments: object) -> None:
        """Mark a call as complete, with its whole arguments if the server repeats them."""
        text = argument_text(arguments)
        if text and call.complete is None:
            if not call.fragments:
                self._add_fragment(call, None, None, text)
            call.fragments = [text]
        self._report_call(call)

    def id_of(self, call: PartialCall) -> str:
        """Return the id of a call in the reply."""
        return self._complete_call(call).id

    @property
    def says_something(self) -> bool:
        """Return True if there is a text, a refusal or a call so far."""
        return bool(self._text or self._refusal or self._calls)

    @property
    def has_calls(self) -> bool:
        """Return True if there is a call so far."""
        return bool(self._calls)

    # --- token counts

    def count(self, usage: object) -> None:
        """Add the server's token counts. A count that a later part of a stream does not name stays."""
        if not isinstance(usage, Mapping):
            return
        for name, value in usage.items():
            if isinstance(value, Mapping):
                before = self._counts.get(name)
                named = {key: each for key, each in value.items() if each is not None}
                self._counts[name] = {**before, **named} if isinstance(before, dict) else named
            elif value is not None:
                self._counts[name] = value

    def add_counts(self) -> None:
        """Add the counts to the usage of the reply: the next ones are those of its next part."""
        counts, self._counts = self._counts, {}
        if (found := usage_of(counts)) is not None:
            self.usage = found if self.usage is None else self.usage + found
        if more := further_usage(counts):
            self.of_response["usage"] = more

    # --- the end

    def finish(self) -> ChatResponse:
        """Return the whole reply, and add its last events.

        Raises `ModelTruncatedError`, `ModelRefusedError` or `ModelProtocolError`.
        """
        self._release_surrogates()
        self.add_counts()
        calls = self._find_real_calls()
        cut = self.is_cut
        has_broken_call = any(not _is_usable(call) for call in calls)
        if cut and (self.ends_in_call or has_broken_call or (self._calls and not calls)):
            raise ModelTruncatedError("the reply was cut at the token limit inside a tool call", "".join(self._text))
        if has_broken_call and self.finish_reason is FinishReason.CONTENT_FILTER:
            raise ModelRefusedError("the server's content filter stopped the reply inside a tool call")
        text = "".join(self._text)
        # A filter may stop a reply after a call of which nothing is missing.
        filtered = bool(text) and self.finish_reason is FinishReason.CONTENT_FILTER
        if not calls:
            self._check_saying(text)
            if cut and self._wants_json and not _is_json(text):
                raise ModelTruncatedError("the reply was cut at the token limit inside a structured answer", text)
        requests = tuple(self._complete_call(call) for call in calls)
        if calls and not cut and not filtered:
            self.finish_reason = FinishReason.TOOL_EXECUTION
        elif self.finish_reason is FinishReason.TOOL_EXECUTION and not calls:
            self.finish_reason = FinishReason.STOP
        reasoning = "".join(self._reasoning) or None
        # The text of an empty reply without calls is "".
        attributes, of_response = self._collect_attributes()
        message = AiMessage(text or (None if calls else ""), requests, reasoning, attributes)
        response = ChatResponse(message, self.usage, self.finish_reason, self.id, self.model, of_response)
        self.events.append(CompleteResponse(response))
        return response

    def _collect_attributes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the attributes of the message and of the response, limited in size."""
        if self._refusal and (self._text or self._calls):
            self.of_message["refusal"] = "".join(self._refusal)
        if self.finish_reason is FinishReason.OTHER and self.ending:
            self.of_response["finish_reason"] = self.ending
        if self.attributes:
            self.attributes = storable(self.attributes)
        if not self.of_message and not self.of_response:
            return self.attributes, {}
        kept, large = split_by_size(self.of_message, LARGEST_MESSAGE_ATTRIBUTES)
        of_response, left_out = split_by_size({**large, **self.of_response}, LARGEST_RESPONSE_ATTRIBUTES)
        if left_out:
            of_response[LEFT_OUT] = list(left_out)[:100]
        return {**kept, **self.attributes}, of_response

    def _check_saying(self, text: str) -> None:
        """Raise an error for a reply without a call, unless it has text or may be empty."""
        if self.ending is not None and is_malformed_call(self.ending):
            what = "the model wrote a tool call that its server cannot read"
            raise ModelProtocolError(f"{what}; its finish_reason is {self.ending}")
        if any(call.arguments.strip() for call in self._calls):
            raise ModelProtocolError("the reply contains a tool call without a name")
        if text:
            return
        if self._refusal:
            raise ModelRefusedError("".join(self._refusal))
        match self.finish_reason:
            case FinishReason.CONTENT_FILTER:
                raise ModelRefusedError("the server's content filter stopped the reply before any text")
            case FinishReason.LENGTH:
                raise ModelTruncatedError("the reply was cut at the token limit before any text")
            case _ if self.unread:
                names = ", ".join(dict.fromkeys(self.unread))
                raise ModelProtocolError(f"the reply contains no text and no tool call, only: {names[:500]}")
            case FinishReason.STOP if not self._calls:
                return
        if self._calls:
            raise ModelProtocolError("the reply contains only a tool call without a name")
        if self.finish_reason is FinishReason.TOOL_EXECUTION:
            raise ModelProtocolError(
                "the reply's finish reason is a tool call, but it contains neither a call nor text"
            )
        raise ModelProtocolError(f"the reply is empty; its finish_reason is {self.ending or 'null'}")

    # --- assigning fragments to calls

    def _find_continued_call(
        self, key: Hashable | None, identity: str | None, name: str | None, arguments: object
    ) -> PartialCall | None:
        """Return the call that a fragment continues, or None for a new call."""
        if key is not None:
            return self._find_call_at(self._at_index.get(key, []), identity, name, arguments)
        if not self._calls:
            return None
        last = self._calls[-1]
        if identity is not None:
            known = self._find_by_id(self._calls, identity)
            if known is not None:
                return None if self._is_another(known, name, arguments) else known
            return last if last.id is None and last.name is None else None
        if name is None:
            return last
        # A name starts a new call, unless it repeats the name of the call whose arguments continue.
        goes_on = last.name == name and last.fragments and not _ends_object(last)
        return last if goes_on and (last.id is None or can_only_continue(arguments)) else None

    def _find_call_at(
        self, here: list[PartialCall], identity: str | None, name: str | None, arguments: object
    ) -> PartialCall | None:
        if not here:
            # Servers that number fragments instead of calls repeat the id, and send the name only once.
            return None if identity is None or name is not None else self._find_by_id(self._calls, identity)
        last = here[-1]
        if identity is None or last.id == identity:
            return None if self._is_another(last, name, arguments) else last
        if (known := self._find_by_id(here, identity)) is not None:
            return known
        if last.id is None:
            return None if name is not None and last.name is not None and _is_complete(last) else last
        # One vendor changes the id within a call. The first fragment of a call always has a name.
        return None if name is not None else last

    def _is_another(self, call: PartialCall, name: str | None, arguments: object) -> bool:
        """Return True if a name at the index of a call belongs to the next call: some servers send no index."""
        if name is None or call.name is None:
            return False
        if name == call.name:
            return _is_another_object(call, arguments)
        known, held = self._to_known_name(name), self._to_known_name(call.name)
        if known == held or known not in self._tool_names:
            return False
        return _ends_object(call) or (held in self._tool_names and not call.fragments and not known.startswith(held))

    def _read_name(self, value: object) -> str | None:
        """Return the name in a fragment. One gateway sends "null" or "None" instead of no name (litellm#12513)."""
        name = _read_fragment(value)
        return None if name in ("null", "None") and name not in self._tool_names else name

    def _open_call(self, key: Hashable | None) -> PartialCall:
        if self._calls:
            self._report_call(self._calls[-1])
        call = PartialCall(len(self._calls))
        self._calls.append(call)
        if key is not None:
            self._at_index.setdefault(key, []).append(call)
        return call

    @staticmethod
    def _find_by_id(calls: list[PartialCall], identity: str) -> PartialCall | None:
        return next((call for call in reversed(calls) if call.id == identity), None)

    def _add_fragment(self, call: PartialCall, identity: str | None, name: str | None, arguments: object) -> None:
        if call.complete is not None:
            return  # its tool may already run, so later fragments are ignored
        if call.id is None:
            call.id = identity
        if name is not None:
            self._set_name(call, name)
        piece = argument_text(arguments)
        if piece:
            call.fragments.append(piece)
            self.events.append(PartialToolCall(call.position, call.id, call.name, piece))

    def _set_name(self, call: PartialCall, fragment: str) -> None:
        """Set the name of a call. A second fragment is appended only if it must be the rest of the name."""
        if call.name is None:
            call.name = fragment
        elif (
            fragment == call.name
            or self._to_known_name(call.name) in self._tool_names
            or any(map(str.strip, call.fragments))
        ):
            return
        elif self._to_known_name(fragment) in self._tool_names and fragment.startswith(call.name):
            call.name = fragment
        else:
            call.name += fragment

    def _to_known_name(self, name: str) -> str:
        """Return the name without the prefix `functions.`, if only the rest is the name of a tool."""
        rest = name.removeprefix("functions.").strip()
        return rest if name not in self._tool_names and rest in self._tool_names else name

    # --- completing

    def _find_real_calls(self) -> list[PartialCall]:
        """Return the calls with a name. Arguments without a name belong to the previous call if it is incomplete."""
        real: list[PartialCall] = []
        for call in self._calls:
            if call.name is not None:
                real.append(call)
            elif real and call.fragments and real[-1].complete is None and not _is_usable(real[-1]):
                real[-1].fragments += call.fragments
        return real

    def _report_call(self, call: PartialCall) -> None:
        """Report a complete call before the reply ends, as soon as another one begins, so that its tool can start."""
        if call.name is not None and call.complete is None and _is_complete(call):
            self._complete_call(call)

    def _complete_call(self, call: PartialCall) -> ToolExecutionRequest:
        if call.complete is None:
            name = self._to_known_name(call.name or "")
            call.attributes = storable(call.attributes) if call.attributes else {}  # later fields are added to it
            call.complete = ToolExecutionRequest(
                self._make_unique_id(call.id), name, final_arguments(call.fragments), call.attributes
            )
            self.events.append(CompleteToolCall(call.position, call.complete))
        return call.complete

    def _make_unique_id(self, given: str | None) -> str:
        """Return the server's id, or a generated one if it is missing, duplicate or too long."""
        identity = given
        while not identity or len(identity) > LONGEST_ID or identity in self._ids:
            identity = uuid.uuid4().hex[:9]  # the strictest server requires nine letters and digits
        self._ids.add(identity)
        return identity

    # --- surrogates

    def _join_surrogates(self, channel: str, piece: str) -> str:
        """Join the two surrogates of a character that a server split. A lone surrogate is replaced."""
        piece = self._held.pop(channel, "") + piece
        try:
            piece.encode()
        except UnicodeEncodeError:
            if "\ud800" <= piece[-1] <= "\udbff":
                self._held[channel], piece = piece[-1], piece[:-1]
            return whole_characters(piece)
        return piece

    def _release_surrogates(self) -> None:
        """Replace surrogates that never got their second half."""
        held, self._held = self._held, {}
        for channel in held:
            (self.text if channel == "text" else self.reasoning)("\ufffd")


def _is_usable(call: PartialCall) -> bool:
    """Return True if the call's arguments are a complete object."""
    text = call.arguments
    return bool(text.strip()) and strict_arguments(text) is not None


def _ends_object(call: PartialCall) -> bool:
    """Return True if the arguments so far are a complete object. Checks the last fragment first, which is fast."""
    return call.fragments[-1:] != [] and call.fragments[-1].rstrip().endswith("}") and _is_usable(call)


def _is_complete(call: PartialCall) -> bool:
    """Return True if nothing can follow: the arguments are a complete, non-empty object."""
    return _ends_object(call) and bool(strict_arguments(call.arguments))


def _is_another_object(call: PartialCall, arguments: object) -> bool:
    """Return True if `arguments` are a second complete object."""
    text = argument_text(arguments).strip()
    if not text.startswith("{") or not text.endswith("}") or not _is_complete(call):
        return False
    value = strict_arguments(text)
    return bool(value) and value != strict_arguments(call.arguments)


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def key_of(index: object) -> Hashable | None:
    """Return an index as a key, or None if it is missing or invalid."""
    if type(index) is int and index >= 0:
        return index
    if index is None or index == "" or isinstance(index, (dict, list, bool)):
        return None
    text = str(index).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def _read_fragment(value: object) -> str | None:
    """Return a non-empty text or an integer as text, else None."""
    if isinstance(value, str):
        return value.strip() or None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def merged_details(details: list[dict[str, Any]], more: object) -> None:
    """Add fragments of a streamed list. The texts of fragments with the same type and index are joined."""
    for piece in more if isinstance(more, list) else ():
        if not isinstance(piece, Mapping):
            continue
        last = details[-1] if details else None
        if last is None or any(last.get(key) != piece.get(key) for key in ("type", "index")):
            details.append(dict(piece))
            continue
        for key, value in piece.items():
            before = last.get(key)
            if key in ("text", "summary", "data") and isinstance(before, str) and isinstance(value, str):
                last[key] = before + value
            elif value is not None:
                last[key] = value


# --- the argument text of one call


def argument_text(arguments: object) -> str:
    """Return the text of a fragment. Some servers send an object."""
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else compact_json(arguments)


def can_only_continue(arguments: object) -> bool:
    """Return True if this fragment cannot be the beginning of arguments."""
    text = argument_text(arguments).lstrip()
    return bool(text) and text[0] not in '{"n'


def final_arguments(fragments: list[str]) -> str:
    """Return the final argument text: a JSON object if the fragments can be read as one, else unchanged."""
    text = whole_characters("".join(fragments))
    try:
        return arguments_text(text)
    except ValueError:
        pieces = [piece for piece in fragments if piece.strip()]
        if len(pieces) < 2 or strict_arguments(pieces[-1]) is None:
            return text
        cumulative = all(later.startswith(piece) for piece, later in pairwise(pieces))
        return pieces[-1] if cumulative or pieces[-1].startswith("".join(pieces[:-1])) else text


# --- details: token counts, and attributes for all other fields


def usage_of(usage: Mapping[str, Any]) -> TokenUsage | None:
    """Return the token counts, under any of the names that servers use, or None."""
    given = _find_count(usage, "prompt_tokens", "input_tokens")
    made = _find_count(usage, "completion_tokens", "output_tokens")
    if given is None and made is None:
        return None
    given, into = given or 0, _find_mapping(usage, "prompt_tokens_details", "input_tokens_details")
    cached = _find_count(into, "cached_tokens")
    if cached is None:
        cached = _find_count(usage, "prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    written = _find_count(into, *_WRITTEN)
    if written is None:
        written = _find_count(usage, *_WRITTEN)
    if not into and usage.get("prompt_tokens") is None:  # Anthropic counts only the rest as input
        given += (_find_count(usage, "cache_read_input_tokens") or 0) + (
            _find_count(usage, "cache_creation_input_tokens") or 0
        )
    out_of = _find_mapping(usage, "completion_tokens_details", "output_tokens_details")
    thought = _find_count(out_of, "reasoning_tokens", "thinking_tokens")
    return TokenUsage(given, made or 0, cached or 0, thought or 0, written or 0)


def _find_mapping(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found = next(filter(None, map(usage.get, names)), None)
    return found if isinstance(found, Mapping) else {}


_WRITTEN = ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")

_KNOWN = frozenset(
    {"prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "total_tokens", "cached_tokens"}
    | {"prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "cache_read_input_tokens", *_WRITTEN}
)
_DETAILS = frozenset({"cached_tokens", "reasoning_tokens", "thinking_tokens", *_WRITTEN})


def further_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage that `TokenUsage` does not contain, such as costs, times and audio tokens, without zeros."""
    found: dict[str, Any] = {}
    for name in usage.keys() - _KNOWN if len(usage) > 3 else ():
        value = usage[name]
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if key not in _DETAILS and each}
        if value:
            found[name] = value
    return found


def _find_count(counts: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        count = counts.get(name)
        if isinstance(count, (int, float)) and not isinstance(count, bool) and 0 <= count < 1e15:
            return int(count)
    return None


# --- attributes


def add_extras(extras: dict[str, Any], values: Mapping[str, Any], names: Collection[str]) -> None:
    """Add fields of a message or a choice to `extras`. In a stream, lists and texts arrive in parts and are joined."""
    for name in names:
        if not _is_empty(value := values[name]):
            extras[name] = _merge_values(extras.get(name), value, name)


def replace_extras(extras: dict[str, Any], values: Mapping[str, Any], names: Collection[str]) -> None:
    """Set fields of a reply in `extras`. The chunks of a stream repeat them."""
    for name in names:
        if not _is_empty(value := values[name]):
            extras[name] = value


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)


_IN_PIECES = frozenset(
    {"arguments", "content", "data", "input", "reasoning", "reasoning_content", "text", "transcript"}
)


def _merge_values(before: Any, more: Any, name: str) -> Any:
    if isinstance(before, dict) and isinstance(more, dict):
        return {**before, **{key: _merge_values(before.get(key), value, key) for key, value in more.items()}}
    if isinstance(before, list) and isinstance(more, list):
        before.extend(more)  # a copy, made below
        return before
    if isinstance(before, str) and isinstance(more, str) and name in _IN_PIECES:
        return before + more
    if more is None:
        return before
    return list(more) if isinstance(more, list) else _merge_values({}, more, name) if isinstance(more, dict) else more


def split_by_size(values: Mapping[str, Any], largest: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into those that fit into `largest` bytes of JSON together, as JSON values, and the others."""
    kept: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        try:
            form = _encode_json({name: value})
        except ValueError:
            others[name] = None
            continue
        largest -= len(form)
        if largest < 0:
            others[name] = value
            largest += len(form)
        else:
            kept |= from_json(form)
    return kept, others


def storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that stores can write as JSON: numbers that JSON does not have become None."""
    return split_by_size(values, sys.maxsize)[0]


def _encode_json(value: object) -> bytes:
    """Return a value as JSON. Raises `ValueError` if it is nested too deeply."""
    try:
        return to_json(value, inf_nan_mode="null")
    except ValueError:  # a lone surrogate, or too deeply nested
        try:
            return to_json(json.loads(whole_json(value)), inf_nan_mode="null")
        except RecursionError as error:
            raise ValueError(str(error)) from error
