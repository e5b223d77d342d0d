"""Turns messages into token ids and sampled ids into actions; what a rollout knows of a model's format.

Sampled ids are never rendered again: a conversation is only ever extended, or opened anew. This module
must not know engines, environments or rewards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError, ModelError, SurefootError
from surefoot.core.types import Action, Finish, Int32, MalformedCall, Message, ToolCall
from surefoot.policy.chatml import (
    IM_END,
    IM_START,
    MARKUP,
    ChatMLRenderer,
    FastTokenizer,
    PlainText,
    map_strings,
    turn_ids,
    without_surrogates,
)
from surefoot.policy.toolcalls import ParsedText, call_json, parse_tool_calls, read_call
from surefoot.tools.base import Tool, make_tool

if TYPE_CHECKING:
    from surefoot.policy.models import LoadedModel

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ZERO_WIDTH_SPACE = "\u200b"
_PARTIAL = "\ufffd"
# Whether a tool exists and a value fits its type is for the environment to say; formats without quotes
# report "invalid_json" where they took a value for text.
_READABLE = ("ok", "unknown_tool", "invalid_json")
_LONGEST_CHARACTER = 4  # bytes of UTF-8, so tokens that may have to be decoded together


class Renderer(Protocol):
    """What a codec needs of a renderer: the interface of ``renderers.Renderer``."""

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> Any:
        """Ids with their origin."""
        ...

    def render_ids(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Ids only."""
        ...

    def parse_response(self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None) -> Any:
        """Sampled ids as content and calls."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Any,
        previous_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
    ) -> Any:
        """The ids so far and what the next turn adds, or None."""
        ...


@dataclass(frozen=True, slots=True)
class RendererProbe:
    """What a renderer was seen to do; ``detail`` says what went wrong, or that nothing did.

    prefix_stable: three turns could be extended without rendering the history anew. untrusted_safe:
    special tokens' text in messages changed no special token. tool_calls_round_trip: a call written
    by the renderer is read back equal.
    """

    prefix_stable: bool
    untrusted_safe: bool
    tool_calls_round_trip: bool
    detail: str


class Codec:
    """Messages to ids and ids to actions, for one model's tokenizer and renderer.

    ``opaque`` says that the renderer is the tokenizer's own template, of which nothing is known but
    its output; calls are then expected in Hermes style. Everything is deterministic.
    """

    def __init__(self, tokenizer: FastTokenizer, renderer: Renderer, *, opaque: bool = False) -> None:
        self.renderer = renderer
        self._opaque = opaque
        # ChatMLRenderer keeps content apart from special tokens itself, without changing its text.
        own = isinstance(renderer, ChatMLRenderer)
        self._plain = renderer.plain if own else PlainText(tokenizer)
        self._defuses = not own
        self._normalizer: Any = tokenizer.backend_tokenizer.normalizer
        self.stop_ids: tuple[int, ...] = tuple(int(token) for token in renderer.get_stop_token_ids())
        if not self.stop_ids:
            raise ModelError(f"the tokenizer of {tokenizer.name_or_path!r} names no token that ends a turn")
        self._generation = self._generation_prompt()
        self._thinks = self._plain.decode(self._generation).rstrip().endswith("<think>")
        self._hermes = opaque or own or self._writes_hermes()
        self._probe: RendererProbe | None = None

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Int32:
        """int32[N]: the prompt of a conversation, ending where the policy's turn begins.

        Raises DataError when untrusted text would become a special token, ModelError when the
        model's template refuses the conversation.
        """
        chat, specs = self._chat(messages), self._specs(tools)
        try:
            if self._opaque or not self._defuses:
                ids = self.renderer.render_ids(chat, tools=specs, add_generation_prompt=True)
            else:
                rendered = self.renderer.render(chat, tools=specs, add_generation_prompt=True)
                self._check_content(rendered, 0)
                ids = cast("list[int]", rendered.token_ids)
        except SurefootError:
            raise
        except Exception as error:  # templates raise whatever they like on a conversation they refuse
            roles = ", ".join(message.role for message in messages)
            raise ModelError(f"the chat template refuses a conversation of ({roles}): {error}") from error
        return np.asarray(ids, dtype=np.int32)

    def preamble(self, text: str) -> Int32:
        """int32[N]: ``text`` as a message before a conversation, for a reader that is not the policy.

        Raises like :meth:`start`.
        """
        return self._told((Message("user", text),), ())

    def finished(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Int32:
        """int32[N]: a conversation that nobody sampled, up to the end of its last turn.

        For scripted episodes only: sampled ids are kept, never rendered again. Raises as :meth:`start`.
        """
        ids = self._told(messages, tools)
        ends = np.flatnonzero(np.isin(ids, self.stop_ids))
        return ids[: int(ends[-1]) + 1] if len(ends) else ids

    def _told(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32:
        """A conversation without the invitation to go on that :meth:`start` ends with."""
        ids = self.start(messages, tools)
        cut = len(ids) - len(self._generation)
        return ids[:cut] if ids[cut:].tolist() == self._generation else ids

    def extend(
        self, context: Ids, finish: Finish, new_messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> Int32 | None:
        """int32[M]: only what follows ``context``, or None if that would need another history.

        ``context`` holds every id so far, sampled ones included, without padding. What is added: the
        end of the turn where the token limit cut it, ``new_messages``, the next generation prompt.
        None means that the caller opens a new segment with ``start`` over all messages. Raises
        DataError when a turn that finished with STOP does not end with a stop token.
        """
        prior = [int(token) for token in context]
        if finish is Finish.STOP and (not prior or prior[-1] not in self.stop_ids):
            last = prior[-1] if prior else "nothing"
            raise DataError(f"the turn finished with stop but ends with {last}; stop ids: {self.stop_ids}")
        begin = _last_end(prior, self._generation)
        if begin is None:
            return None
        bridged = self.renderer.bridge_to_next_turn(
            prior[:begin], prior[begin:], self._chat(new_messages), tools=self._specs(tools)
        )
        if bridged is None:
            return None
        ids = [int(token) for token in bridged.token_ids]
        # A renderer may trim or rewrite the history; what was sampled must stand as it was.
        if ids[: len(prior)] != prior or len(ids) == len(prior):
            return None
        if self._defuses:
            self._check_content(bridged, len(prior))
        return np.asarray(ids[len(prior) :], dtype=np.int32)

    def parse(self, sampled: Ids, finish: Finish, *, offset: int = 0, tools: Sequence[Tool] = ()) -> Action:
        """The action that ``sampled`` (int[M], stop token included or not) stands for. Never raises.

        Calls get the ids ``call_<offset>`` and up: pass the number of calls so far to keep them unique
        in an episode. A turn cut inside a call executes none of its calls. In ChatML, a special token
        inside the turn is malformed: text around it was not meant as one turn. ``tools`` lets formats
        without quotes tell text from numbers. Thinking stays in the text, tags included.
        """
        ids = [int(token) for token in sampled]
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        parsed = self._read(ids, finish is Finish.STOP, tools)
        calls = () if parsed.cut else parsed.calls
        named = (ToolCall(f"call_{offset + i}", name, values) for i, (name, values) in enumerate(calls))
        malformed = parsed.malformed
        if stray := self._plain.stray(ids) if self._hermes else []:
            malformed += (MalformedCall(" ".join(stray), "a special token inside a turn"),)
        return Action(parsed.text, tuple(named), malformed, finish)

    def encode_action(self, action: Action, *, tools: Sequence[Tool] = ()) -> Int32:
        """int32[K]: what a policy would have sampled for ``action``, stop token included unless cut.

        Raises DataError if the action cannot be written so that it is read back as the same calls and
        (but for outer blank space) the same text, for example when its text holds a call's tag. For
        ``tools`` see :meth:`parse`.
        """
        if action.malformed:
            raise DataError("an action with malformed calls cannot be encoded; encode what it should say")
        if self._hermes:
            ids = turn_ids(self._plain, action.text, [(c.name, c.arguments) for c in action.tool_calls])
        else:
            ids = self._rendered_turn(action)
        if action.finish is Finish.STOP:
            ids = [*ids, self.stop_ids[0]]
        back = self.parse(ids, action.finish, tools=tools)
        if back.malformed or _spoken(back) != _spoken(action):
            raise DataError(f"an action does not survive encoding: {action!r} is read back as {back!r}")
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Ids) -> str:
        """The text of ``ids``, special tokens included."""
        return self._plain.decode([int(token) for token in ids])

    def token_texts(self, ids: Ids) -> list[str]:
        """The text that each id adds; joined, they give ``decode(ids)``.

        A character spread over several tokens stands at the last of them; the others get "".
        """
        tokens = [int(token) for token in ids]
        texts: list[str] = []
        first = done = 0  # decoding starts at `first` for context; text is handed out up to `done`
        for index in range(len(tokens)):
            text = self._plain.decode(tokens[first : index + 1])
            waits = text.endswith(_PARTIAL) and index + 1 - done < _LONGEST_CHARACTER
            if waits and index + 1 < len(tokens):
                texts.append("")
                continue
            texts.append(text[len(self._plain.decode(tokens[first:done])) :])
            first, done = done, index + 1
        return texts

    def probe(self) -> RendererProbe:
        """Try a conversation with tools, thinking and injections; the result is kept."""
        if self._probe is None:
            prefix = _attempt(_prefix_trouble, self)
            untrusted = _attempt(_untrusted_trouble, self)
            calls = _attempt(_calls_trouble, self)
            troubles = "; ".join(trouble for trouble in (prefix, untrusted, calls) if trouble)
            self._probe = RendererProbe(not prefix, not untrusted, not calls, troubles or "no trouble found")
        return self._probe

    def specials(self, ids: Ids) -> list[int]:
        """Those of ``ids`` that steer the model, such as turn marks, in order."""
        return [int(token) for token in ids if int(token) in self._plain.control]

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that untrusted content must not smuggle in as special tokens."""
        return tuple(self._plain.control.values())

    @property
    def opaque(self) -> bool:
        """Whether the tokenizer's own template renders, so that no turn can be extended."""
        return self._opaque

    def _generation_prompt(self) -> list[int]:
        """The ids that a renderer puts where the policy's turn begins."""
        chat = [{"role": "user", "content": "x"}]
        bare = self.renderer.render_ids(chat)
        full = self.renderer.render_ids(chat, add_generation_prompt=True)
        if full[: len(bare)] != bare or len(full) == len(bare):
            raise ModelError("the chat template marks no place where the assistant's turn begins")
        return [int(token) for token in full[len(bare) :]]

    def _writes_hermes(self) -> bool:
        """Whether the renderer itself writes calls as ``<tool_call>{json}</tool_call>``."""
        try:
            ids = self._rendered_turn(Action("", (ToolCall("call_0", "f", {"x": 1}),)))
        except Exception:  # formats without tools refuse in many ways; Hermes is then what we teach
            return True
        return parse_tool_calls(self._plain.spoken(ids), complete=True).calls == (("f", {"x": 1}),)

    def _rendered_turn(self, action: Action) -> list[int]:
        """The sampled part of an assistant message as the renderer writes it, without stop token."""
        chat = self._chat([Message("user", "x"), Message("assistant", action.text, action.tool_calls)])
        out = self.renderer.render(chat)
        owned = zip(out.token_ids, out.message_indices, out.sampled_mask, strict=True)
        ids = [int(token) for token, owner, sampled in owned if owner == 1 and sampled]
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def _read(self, ids: list[int], complete: bool, tools: Sequence[Tool]) -> ParsedText:
        if self._hermes:
            return parse_tool_calls(self._plain.spoken(ids), complete=complete, thinking=self._thinks)
        try:
            found = self.renderer.parse_response(ids, tools=self._specs(tools), prompt_ids=self._generation)
            return _from_response(found, complete)
        except Exception as error:  # a parser that fails on what a policy wrote is that turn's trouble only
            text = self._plain.spoken(ids)
            return ParsedText("", (), (MalformedCall(text, f"the parser failed: {error}"),), not complete)

    def _chat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages in the form renderers take, their text made harmless where they do not see to it."""
        chat: list[dict[str, Any]] = []
        for message in messages:
            clean = self._own_text if message.role == "assistant" else self._untrusted
            item: dict[str, Any] = {"role": message.role, "content": clean(message.content)}
            if message.tool_calls:
                item["tool_calls"] = [
                    {
                        "type": "function",
                        "id": call.id,
                        "function": {
                            "name": self._untrusted(call.name),
                            "arguments": map_strings(call.arguments, self._untrusted),
                        },
                    }
                    for call in message.tool_calls
                ]
            if message.tool_call_id is not None:
                item["tool_call_id"] = message.tool_call_id
            chat.append(item)
        return chat

    def _specs(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        return [map_strings(tool.spec(), self._untrusted) for tool in tools] or None

    def _untrusted(self, text: str) -> str:
        return self._defused(text, ())

    def _own_text(self, text: str) -> str:
        return self._defused(text, MARKUP)

    def _defused(self, text: str, allowed: Sequence[str]) -> str:
        """``text`` with a zero-width space inside whatever would become a special token."""
        text = without_surrogates(text)
        if not self._defuses:
            return text
        tokens = [token for token in self._plain.control.values() if token not in allowed]
        seen = str(self._normalizer.normalize_str(text)) if self._normalizer is not None else text
        if not any(token in text or token in seen for token in tokens):
            return text
        if not any(token in text for token in tokens):
            text = seen
        for token in sorted(tokens, key=len, reverse=True):
            text = text.replace(token, token[0] + _ZERO_WIDTH_SPACE + token[1:])
        return text

    def _check_content(self, rendered: Any, begin: int) -> None:
        """Refuse special tokens that stem from message bodies; the last guard behind defusing."""
        content = cast("list[bool]", rendered.is_content)
        for at in range(begin, len(content)):
            owner = rendered.message_indices[at]
            if not content[at] or owner < 0 or rendered.message_roles[owner] == "assistant":
                continue
            token = self._plain.control.get(rendered.token_ids[at])
            if token is not None:
                raise DataError(f"text of message {owner} would become the special token {token!r}")


def make_codec(loaded: LoadedModel) -> Codec:
    """The codec for a loaded model; needs no network.

    The ``renderers`` package renders the models it knows by name, ChatMLRenderer those whose tokens
    and template are ChatML, and the tokenizer's own template the rest (every turn then opens a new
    segment, since nothing says how such a template goes on). Raises ModelError if there is no template.
    """
    tokenizer = cast("FastTokenizer", loaded.tokenizer)
    known = _known_renderer(loaded.name, tokenizer)
    if known is not None:
        codec = Codec(tokenizer, known)
    elif _is_chatml(tokenizer):
        codec = Codec(tokenizer, ChatMLRenderer(tokenizer))
    elif tokenizer.chat_template:
        create, config = _upstream()
        codec = Codec(tokenizer, create(tokenizer, config("default")), opaque=True)
    else:
        raise ModelError(
            f"model {loaded.name!r} has no chat template and no ChatML tokens; use an instruct model"
        )
    codec.probe()
    return codec


def _known_renderer(name: str, tokenizer: FastTokenizer) -> Renderer | None:
    """The hand-written renderer for exactly this hub id; a fine-tune may have another template."""
    if not _HUB_ID.fullmatch(name):
        return None  # only hub ids are listed; saves loading the package for the small models
    create, config = _upstream()
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(name)
    return None if known is None else create(tokenizer, config(known))


def _upstream() -> tuple[Callable[[Any, Any], Renderer], Callable[[str], Any]]:
    try:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name
    except ImportError as error:
        raise ModelError(
            f"this model's format needs the package renderers, which cannot be loaded: {error}; "
            "install surefoot[train]"
        ) from error
    return cast("Callable[[Any, Any], Renderer]", create_renderer), config_from_name


def _is_chatml(tokenizer: FastTokenizer) -> bool:
    contents = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    template = tokenizer.chat_template
    return {IM_START, IM_END} <= contents and (template is None or IM_START in str(template))


def _from_response(found: Any, complete: bool) -> ParsedText:
    """A ``renderers.ParsedResponse`` under the rules of this package: no repair, cut calls not executed."""
    calls: list[tuple[str, dict[str, Any]]] = []
    malformed: list[MalformedCall] = []
    cut = False
    for call in found.tool_calls:
        status = str(call.status)
        if status == "unclosed_block" and not complete:
            cut = True
        elif status not in _READABLE or not isinstance(call.arguments, dict | str):
            malformed.append(MalformedCall(str(call.raw), status.replace("_", " ")))
        else:
            read = read_call({"name": call.name, "arguments": call.arguments})
            if isinstance(read, str):
                malformed.append(MalformedCall(str(call.raw), read))
            else:
                calls.append(read)
    thought = found.reasoning_content
    text = str(found.content)
    if thought:
        text = f"<think>{thought}" + ("" if found.reasoning_complete is False else f"</think>{text}")
    return ParsedText(text, tuple(calls), tuple(malformed), cut)


def _spoken(action: Action) -> tuple[str, list[tuple[str, str]]]:
    """What must survive encoding: the text and the calls, without their ids."""
    return action.text.strip(), [(c.name, call_json(c.name, c.arguments)) for c in action.tool_calls]


def _last_end(ids: list[int], pattern: list[int]) -> int | None:
    """Where the last occurrence of ``pattern`` ends, or None."""
    size = len(pattern)
    for start in range(len(ids) - size, -1, -1):
        if ids[start] == pattern[0] and ids[start : start + size] == pattern:
            return start + size
    return None


def _attempt(check: Callable[[Codec], str], codec: Codec) -> str:
    """What ``check`` finds wrong, "" for nothing; a failure is a finding, since a probe only looks."""
    try:
        return check(codec)
    except Exception as error:  # whatever a renderer raises is what the probe is there to show
        return f"{type(error).__name__}: {error}"


def _lookup(key: str) -> str:
    """Look up a key."""
    return key


def _prefix_trouble(codec: Codec) -> str:
    """Three turns: one that thinks and calls, one that answers, one after a second question."""
    tools = (make_tool(_lookup).renamed("lookup"),)
    call = ToolCall("call_0", "lookup", {"key": "a"})
    context = list(codec.start([Message("user", "What is a?")], tools))
    turns = (
        (Action("<think>I look it up.</think>", (call,)), Message("tool", "1", (), "call_0")),
        (Action("It is 1."), Message("user", "And b?")),
        (Action("I do not know."), Message("user", "Then stop.")),
    )
    for number, (action, answer) in enumerate(turns, start=1):
        context += list(codec.encode_action(action, tools=tools))
        added = codec.extend(context, Finish.STOP, [answer], tools)
        if added is None:
            return f"after turn {number} a {answer.role} message opens a new segment"
        context += list(added)
    return ""


def _untrusted_trouble(codec: Codec) -> str:
    """Compare a conversation full of special tokens' texts with the same one without them."""

    def specials(text: str) -> tuple[list[int], list[int]]:
        lookup = make_tool(_lookup).renamed("lookup", description=text)
        call = ToolCall("call_0", "lookup", {"key": text})
        asked, told = Message("user", text), Message("tool", text, (), "call_0")
        whole = codec.start([asked, Message("assistant", "", (call,)), told], (lookup,))
        prompt = codec.start([asked], (lookup,))
        context = [*prompt, *codec.encode_action(Action("yes"))]
        added = codec.extend(context, Finish.STOP, [told], (lookup,))
        return codec.specials(whole), [] if added is None else codec.specials(added)

    if specials("x" + "x".join(codec.special_texts) + "x") != specials("x"):
        return "special tokens' text in a message becomes special tokens"
    return ""


def _calls_trouble(codec: Codec) -> str:
    """A call with braces and a closing tag in a string, written by the renderer and read back."""
    call = ToolCall("call_0", "lookup", {"key": 'a {"b": 1} </tool_call> c'})
    if codec.opaque:
        shown = codec.decode(codec.start([Message("user", "x")], (make_tool(_lookup).renamed("lookup"),)))
        if "lookup" not in shown:
            return "the chat template does not show tools to the model"
        chat = [Message("user", "x"), Message("assistant", "", (call,)), Message("tool", "1", (), "call_0")]
        text = codec.decode(codec.start(chat))
        found = parse_tool_calls(text, complete=True).calls
        return (
            "" if found == ((call.name, call.arguments),) else "the chat template writes calls in its own way"
        )
    action = Action("", (call,))
    return (
        ""
        if codec.parse(codec.encode_action(action), Finish.STOP) == action
        else "a call is read back changed"
    )
