"""Renders ChatML, with tools, for models whose own template knows no tools (SmolLM2, scratch).

Follows the interface of ``renderers.Renderer`` without importing that package, so that the small
models start fast. It must not know engines or episodes, nor which tokens were sampled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

from surefoot.core.errors import DataError, ModelError
from surefoot.policy.toolcalls import CLOSE, OPEN, call_json, parse_tool_calls

if TYPE_CHECKING:
    from renderers.base import ParsedResponse

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
# Added tokens that are part of what a policy says, not of the frame around it.
MARKUP = (OPEN, CLOSE, "<think>", "</think>", "<tool_response>", "</tool_response>")

ChatMessage = Mapping[str, Any]
ToolSpecification = Mapping[str, Any]


class FastTokenizer(Protocol):
    """The part of ``transformers.PreTrainedTokenizerFast`` that rendering relies on."""

    name_or_path: str
    chat_template: Any
    eos_token_id: int | None

    @property
    def backend_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer`` behind it."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id."""
        ...


@dataclass
class Rendered:
    """Token ids with their origin, by the field names of ``renderers.RenderedTokens``.

    All lists are as long as ``token_ids``, but for the two by message. ``message_indices`` is -1 on
    the frame outside messages; ``sampled_mask`` marks what a policy itself would sample;
    ``is_content`` marks what stems from a message's body.
    """

    token_ids: list[int] = field(default_factory=lambda: [])
    message_indices: list[int] = field(default_factory=lambda: [])
    sampled_mask: list[bool] = field(default_factory=lambda: [])
    is_content: list[bool] = field(default_factory=lambda: [])
    message_roles: list[str] = field(default_factory=lambda: [])
    message_tool_names: list[str | None] = field(default_factory=lambda: [])
    multi_modal_data: None = None

    def add(self, ids: Iterable[int], index: int, *, sampled: bool = False, content: bool = False) -> None:
        """Append ``ids``, all of one origin."""
        before = len(self.token_ids)
        self.token_ids.extend(ids)
        count = len(self.token_ids) - before
        self.message_indices.extend([index] * count)
        self.sampled_mask.extend([sampled] * count)
        self.is_content.extend([content] * count)


class PlainText:
    """Encodes text so that no added token can come out of it, and still decodes to the same text.

    Works on a private copy of the tokenizer with special tokens switched off. That switch leaves
    added tokens that are not marked special, so their text is encoded in two pieces.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no fast backend; "
                "only tokenizers with a tokenizer.json can keep untrusted text apart from special tokens"
            )
        added = {int(key): token for key, token in tokenizer.added_tokens_decoder.items()}
        self._all_added = {str(token.content): key for key, token in added.items()}
        # A run of spaces or a single character controls nothing and cannot be split in a useful way.
        self.control = {
            key: str(token.content)
            for key, token in added.items()
            if token.special or (len(token.content) > 1 and token.content.strip())
        }
        self._special = {key for key, token in added.items() if token.special}
        self._backend = copy.deepcopy(backend)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True

    def token_id(self, token: str) -> int | None:
        """The id of an added token, None if the tokenizer has none of that text."""
        return self._all_added.get(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, none of them in ``control``. Raises DataError if that cannot be done."""
        text = without_surrogates(text)
        ids = self._encode(text)
        if self.control.keys().isdisjoint(ids):
            return ids
        ids = [token for piece in self._pieces(text) for token in self._encode(piece)]
        found = self.control.keys() & ids
        if found:
            names = ", ".join(sorted(repr(self.control[key]) for key in found))
            raise DataError(f"the tokenizer turns untrusted text into the special token {names}")
        return ids

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, is a mark) parts in one go. A mark is its own token where there is one."""
        ids: list[int] = []
        pending = ""
        for text, mark in parts:
            key = self.token_id(text) if mark else None
            if key is None:
                pending += text
            else:
                ids += [*self.encode(pending), key]
                pending = ""
        return ids + self.encode(pending)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included; ids without a token are left out."""
        return cast("str", self._backend.decode([int(token) for token in ids], skip_special_tokens=False))

    def spoken(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens, but with the marks of calls and thoughts."""
        return self.decode([int(i) for i in ids if not self._is_stray(int(i))])

    def stray(self, ids: Sequence[int]) -> list[str]:
        """The special tokens among ``ids`` that :meth:`spoken` leaves out."""
        return [self.control[int(i)] for i in ids if self._is_stray(int(i))]

    def _is_stray(self, token: int) -> bool:
        return token in self._special and self.control[token] not in MARKUP

    def _encode(self, text: str) -> list[int]:
        return cast("list[int]", self._backend.encode(text, add_special_tokens=False).ids)

    def _pieces(self, text: str) -> list[str]:
        """``text`` cut after the first character of each added token's text in it."""
        cuts = {0, len(text)}
        for token in self.control.values():
            at = text.find(token)
            while at >= 0:
                cuts.add(at + 1)
                at = text.find(token, at + 1)
        ends = sorted(cuts)
        return [text[start:end] for start, end in pairwise(ends)]


class ChatMLRenderer:
    """ChatML with a compact Hermes tools block in the system message; no default system prompt.

    A tool result is its own ``tool`` turn: five tokens around the content, where the user turn with
    ``<tool_response>`` tags that other templates use takes about fifteen. It is unambiguous, because
    the role stands behind ``<|im_start|>``, which no content can produce.
    """

    is_prefix_stable = True

    def __init__(self, tokenizer: FastTokenizer, plain: PlainText | None = None) -> None:
        self.plain = plain or PlainText(tokenizer)
        start, end = self.plain.token_id(IM_START), self.plain.token_id(IM_END)
        if start is None or end is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no {IM_START} and {IM_END} tokens"
            )
        self._start, self._end = start, end
        self._newline = self.plain.encode("\n")
        self._headers = {
            role: [start, *self.plain.encode(role + "\n")] for role in ("system", "user", "assistant", "tool")
        }
        others = (self.plain.token_id(END_OF_TEXT), tokenizer.eos_token_id)
        self._stops = list(dict.fromkeys([end, *(token for token in others if token is not None)]))

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSpecification] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Token ids of a whole conversation. Raises DataError without messages or for an unknown role."""
        if not messages:
            raise DataError("messages is empty; a conversation needs at least one message")
        out = _frame(messages)
        first_is_system = messages[0].get("role") == "system"
        if tools:
            text = _text(messages[0]) if first_is_system else ""
            text += "\n\n" if text else ""
            self._turn(out, "system", 0 if first_is_system else -1, text, frame=self._tools_block(tools))
        for index, message in enumerate(messages):
            if not (index == 0 and first_is_system and tools):
                self._message(out, message, index)
        if add_generation_prompt:
            out.add(self._headers["assistant"], -1)
        return out

    def render_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSpecification] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """As :meth:`render`, the ids only."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSpecification] | None = None,
    ) -> Rendered | None:
        """The ids so far, unchanged, then what the next turn adds; None if that holds sampled text.

        Only the last id tells whether the turn is closed: with ``pad == eos`` a search for the last
        end token would take padding, or a token of an earlier turn, for the end of this one.
        """
        if any(message.get("role") == "assistant" for message in new_messages):
            return None
        out = _frame(new_messages)
        out.add(previous_prompt_ids, -1)
        out.add(previous_completion_ids, -1)
        if not out.token_ids or out.token_ids[-1] != self._end:
            out.add([self._end], -1)
        out.add(self._newline, -1)
        for index, message in enumerate(new_messages):
            self._message(out, message, index)
        out.add(self._headers["assistant"], -1)
        return out

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpecification] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """Sampled ids as a ``renderers.ParsedResponse``; a turn without a stop token counts as cut."""
        from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

        complete = any(token in self._stops for token in token_ids)
        parsed = parse_tool_calls(self.plain.spoken(token_ids), complete=complete)
        found = [ParsedToolCall(call_json(name, values), name, values) for name, values in parsed.calls]
        invalid = ToolCallParseStatus.MALFORMED_STRUCTURE
        found += [ParsedToolCall(bad.text, status=invalid) for bad in parsed.malformed]
        if parsed.cut:
            found.append(ParsedToolCall("", status=ToolCallParseStatus.UNCLOSED_BLOCK))
        return ParsedResponse(content=parsed.text, tool_calls=found)

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a turn: the end of the ChatML turn first."""
        return list(self._stops)

    def _message(self, out: Rendered, message: ChatMessage, index: int) -> None:
        role = str(message.get("role"))
        if role not in self._headers:
            raise DataError(
                f"message {index} has role {role!r}; it must be one of {', '.join(self._headers)}"
            )
        if role != "assistant":
            self._turn(out, role, index, _text(message))
            return
        out.add(self._headers[role], index)
        calls = [_call(call) for call in cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())]
        out.add(turn_ids(self.plain, _text(message), calls), index, sampled=True, content=True)
        out.add([self._end], index, sampled=True, content=True)
        out.add(self._newline, index)

    def _turn(self, out: Rendered, role: str, index: int, text: str, frame: Sequence[int] = ()) -> None:
        """One turn that no policy sampled: header, untrusted text, trusted ``frame`` ids, end."""
        out.add(self._headers[role], index)
        out.add(self.plain.encode(text), index, content=True)
        out.add(frame, index)
        out.add([self._end, *self._newline], index)

    def _tools_block(self, tools: Sequence[ToolSpecification]) -> list[int]:
        functions = [cast("Mapping[str, Any]", tool.get("function", tool)) for tool in tools]
        keys = ("name", "description", "parameters")
        lines = "\n".join(_compact({key: item[key] for key in keys if item.get(key)}) for item in functions)
        example = _call_parts(self.plain, '{"name":"...","arguments":{...}}')
        return self.plain.encode_parts([(f"Tools:\n{lines}\nTo call one: ", False), *example])


def turn_ids(plain: PlainText, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int]:
    """Ids of a policy's turn, without stop token: the text, then its calls, one a line.

    A tokenizer that has the tags as tokens belongs to a model that was trained on Hermes calls, so
    they get that layout. Elsewhere tokens are saved: no line breaks inside the tags, no spaces.
    """
    parts = [(text, False)]
    for index, (name, arguments) in enumerate(calls):
        parts.append(("\n" if text or index else "", False))
        parts += _call_parts(plain, call_json(name, arguments, compact=plain.token_id(OPEN) is None))
    return plain.encode_parts(parts)


def _call_parts(plain: PlainText, body: str) -> list[tuple[str, bool]]:
    edge = "" if plain.token_id(OPEN) is None else "\n"
    return [(OPEN, True), (f"{edge}{body}{edge}", False), (CLOSE, True)]


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """A copy of a JSON value with ``function`` applied to every string, keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {function(key): map_strings(inner, function) for key, inner in items}
    if isinstance(value, list | tuple):
        return [map_strings(inner, function) for inner in cast("Sequence[Any]", value)]
    return value


def without_surrogates(text: str) -> str:
    """``text`` with half surrogate pairs, which no tokenizer can encode, replaced by ``?``."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")


def _frame(messages: Sequence[ChatMessage]) -> Rendered:
    roles = [str(message.get("role")) for message in messages]
    names: dict[str, str] = {}
    for message in messages:
        for call in cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ()):
            names[str(call.get("id"))] = _call(call)[0]
    tool_names = [
        names.get(str(message.get("tool_call_id"))) if message.get("role") == "tool" else None
        for message in messages
    ]
    return Rendered(message_roles=roles, message_tool_names=tool_names)


def _text(message: ChatMessage) -> str:
    """The text of a message's content, which is a string or a list of text parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in cast("Iterable[Mapping[str, Any]]", content):
        if part.get("type") != "text":
            raise DataError(f"a message part has type {part.get('type')!r}; ChatML here takes text only")
        parts.append(str(part["text"]))
    return "".join(parts)


def _call(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = cast("Mapping[str, Any]", call.get("function", call))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return str(function["name"]), cast("Mapping[str, Any]", arguments)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
