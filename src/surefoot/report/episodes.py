"""Chooses the episodes that the report shows and packs them small: one shared vocabulary, runs of numbers.

What is left out is counted, so that the page can say so. Must not know how episodes are drawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from surefoot.core.types import (
    Group,
    Message,
    Provenance,
    Scored,
    Segment,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from surefoot.report.facts import BASE, TREATMENT, Facts, Record, in_order
from surefoot.report.figures import clip
from surefoot.runs.records import to_plain
from surefoot.runs.store import CreditRow

MAX_EPISODES: Final = 60
MAX_EPISODE_TOKENS: Final = 2_500
MAX_PAGE_TOKENS: Final = 100_000
_PER_STEP: Final = 8
_TEXT, _SHORT = 2_000, 300
_LONGEST_CHARACTER: Final = 4  # bytes of UTF-8, so tokens that one character may be spread over
_RL_UNIT = re.compile(r"(?P<arm>.+)-rl(?P<stage>\d*)-(?P<step>\d{6})")

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Shown:
    """One unit of episodes in the reader: why it is there, what of it is shown, how many it has."""

    name: str
    label: str
    total: int
    episodes: tuple[tuple[Task, Trajectory, bool | None], ...]


def choose(facts: Facts) -> list[Shown]:
    """At most :data:`MAX_EPISODES`: the treatment's first, middle and last step (the most divided group of
    each), successes and failures of every variant of final and start, a few of the other units.
    """
    steps = [_training(facts, unit) for unit in _treatment_units(facts.units)]
    main = [name for name in ("final", "start" if "start" in facts.evaluations else "initial")]
    main = [name for name in main if f"eval-{name}" in facts.units]
    others = [name for name in facts.policies if name not in main and f"eval-{name}" in facts.units]
    oracle = [unit for unit in facts.units if unit.endswith("-sft-oracle")][:1]
    room = MAX_EPISODES - _PER_STEP * len(steps) - 2 * len(others) - 2 * len(oracle)
    each = max(1, min(2, room // max(1, 2 * len(main) * (len(facts.variants) + 1))))
    shown = [_evaluation(facts, name, each) for name in main] + steps
    shown += [_evaluation(facts, name, 1, only=BASE) for name in others]
    shown += [_oracle(facts, unit) for unit in oracle]
    kept: list[Shown] = []
    left = MAX_EPISODES
    for unit in shown:
        part = unit.episodes[:left]
        left -= len(part)
        if part:
            kept.append(Shown(unit.name, unit.label, unit.total, part))
    return kept


def _treatment_units(units: Sequence[str]) -> list[str]:
    """First, middle and last step of the treatment that is stored."""
    found: list[tuple[int, int, str]] = []
    for unit in units:
        match = _RL_UNIT.fullmatch(unit)
        if match and match["arm"] == TREATMENT:
            found.append((int(match["stage"] or 0), int(match["step"]), unit))
    names = [unit for _, _, unit in sorted(found)]
    places = sorted({0, (len(names) - 1) // 2, len(names) - 1}) if names else []
    return [names[place] for place in places]


def _training(facts: Facts, unit: str) -> Shown:
    groups = facts.groups(unit)
    match = _RL_UNIT.fullmatch(unit)
    step = int(match["step"]) if match else 0
    group = max(groups, key=_spread, default=None)
    members = group.trajectories[:_PER_STEP] if group is not None else ()
    episodes = tuple((group.task, t, None) for t in members) if group is not None else ()
    label = f"training, {TREATMENT}, step {step} (the group with the widest returns)"
    return Shown(unit, label, sum(len(g.trajectories) for g in groups), episodes)


def _spread(group: Group) -> float:
    values = [t.value for t in group.trajectories if t.value is not None]
    return max(values) - min(values) if values else -1.0


def _evaluation(facts: Facts, policy: str, each: int, *, only: str | None = None) -> Shown:
    """``each`` successes and failures of every variant, one more of each on base."""
    groups = facts.groups(f"eval-{policy}")
    judged = [item for group in groups for item in _judged(facts, policy, group)]
    variants = [only] if only else in_order({task.variant for task, _, _ in judged}, (BASE,))
    episodes: list[tuple[Task, Trajectory, bool | None]] = []
    for variant in variants:
        count = each + (variant == BASE and only is None)
        for outcome in (True, False):
            fitting = [i for i in judged if i[0].variant == variant and i[2] is outcome]
            episodes += fitting[:count]
        if not any(i[0].variant == variant for i in episodes):  # nothing was scored: show it all the same
            episodes += [i for i in judged if i[0].variant == variant][:count]
    return Shown(f"eval-{policy}", f"evaluation of {policy}", len(judged), tuple(episodes))


def _judged(facts: Facts, policy: str, group: Group) -> list[tuple[Task, Trajectory, bool | None]]:
    """Members of a group with their success, None where it is not known.

    An evaluation lists the successes of a task's scored episodes in order, without their ids.
    """
    variants: Mapping[str, Record] = facts.evaluations.get(policy, {}).get("variants", {})
    wins: list[float] = variants.get(group.task.variant, {}).get("scores", {}).get(group.task.id, [])
    scored = [t.id for t in group.trajectories if isinstance(t.final, Scored)]
    if len(wins) == len(group.trajectories):
        scored = [t.id for t in group.trajectories]
    known = dict(zip(scored, wins, strict=True)) if len(wins) == len(scored) else {}
    return [(group.task, t, bool(known[t.id]) if t.id in known else None) for t in group.trajectories]


def _oracle(facts: Facts, unit: str) -> Shown:
    pairs = [(group.task, t, None) for group in facts.groups(unit) for t in group.trajectories]
    return Shown(unit, "cold start: what the script demonstrated", len(pairs), tuple(pairs[:2]))


# -------------------- packing


def token_texts(decode: Decode, ids: Sequence[int], memory: dict[tuple[int, ...], str]) -> list[str]:
    """The text that each id adds. A character spread over several tokens stands at the last of them.

    ``memory`` keeps what was decoded, since prompts repeat.
    """

    def text_of(tokens: list[int]) -> str:
        key = tuple(tokens)
        if key not in memory:
            memory[key] = decode(tokens)
        return memory[key]

    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for place, token in enumerate(ids, 1):
        pending.append(token)
        whole = text_of(before + pending)
        if whole.endswith("\ufffd") and len(pending) < _LONGEST_CHARACTER and place < len(ids):
            texts.append("")
            continue
        texts.append(whole[len(text_of(before)) if before else 0 :])
        before, pending = pending, []
    return texts


class Packer:
    """Turns chosen units into the reader's data. ``decode`` is None when the tokenizer is not at hand;
    blocks then hold messages in place of tokens.
    """

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._vocabulary: dict[tuple[int, str], int] = {}
        self._memory: dict[tuple[int, ...], str] = {}
        self._left = MAX_PAGE_TOKENS

    def pack(self, shown: Sequence[Shown], credit: Callable[[str], Mapping[str, CreditRow]]) -> Record:
        """``{"vocabulary": [[id, text], ...], "units": [...]}``, plain JSON values."""
        units: list[Record] = []
        for unit in shown:
            trained = credit(unit.name)
            episodes: list[Record] = []
            for task, trajectory, success in unit.episodes:
                if self._left <= 0:
                    break
                episodes.append(self._episode(task, trajectory, success, trained.get(trajectory.id)))
            if episodes:
                fields = {"name": unit.name, "label": unit.label, "total": unit.total}
                units.append({**fields, "episodes": episodes})
        return {"vocabulary": [list(entry) for entry in self._vocabulary], "units": units}

    def _episode(
        self, task: Task, trajectory: Trajectory, success: bool | None, trained: CreditRow | None
    ) -> Record:
        final = trajectory.final
        cost = trajectory.cost
        versions = {int(v) for s in trajectory.segments for v in np.unique(s.version[s.sampled])}
        return {
            "id": trajectory.id,
            "task": task.id,
            "variant": task.variant,
            "reference": clip(_plain_text(task.reference), _SHORT),
            "success": success,
            "return": round(final.value, 6) if isinstance(final, Scored) else None,
            "trust": final.trust.name.lower() if isinstance(final, Scored) else None,
            "unscored": None if final is None or isinstance(final, Scored) else clip(final.reason, _SHORT),
            "advantage": None
            if trained is None or trained.advantage is None
            else round(trained.advantage, 6),
            "unused": None if trained is None or trained.used else clip(trained.reason, _SHORT),
            "stop": trajectory.stop.value,
            "truncated": trajectory.truncated,
            "fault": clip(trajectory.fault, _SHORT),
            "versions": sorted(versions),
            "counts": {
                "turns": len(trajectory.turns),
                "tool calls": cost.tool_calls,
                "prompt tokens": cost.prompt_tokens,
                "observation tokens": cost.observation_tokens,
                "sampled tokens": cost.sampled_tokens,
                "cached tokens": cost.cached_tokens,
            },
            "scores": [_score(score) for score in trajectory.scores[:20]],
            "blocks": self._blocks(task, trajectory, trained.turn_advantages if trained else ()),
        }

    def _blocks(self, task: Task, trajectory: Trajectory, advantages: Sequence[float] = ()) -> list[Record]:
        """The episode in order: what the policy was shown, what it did, turn by turn.

        ``advantages`` by turn are shown where credit differs between turns.
        """
        blocks: list[Record] = []
        cap = min(MAX_EPISODE_TOKENS, self._left)
        current, begin = -1, 0
        texts: list[str] = []
        for turn in trajectory.turns:
            segment = trajectory.segments[turn.segment]
            if turn.segment != current:
                current, begin, texts = turn.segment, 0, self._texts(segment)
            title, messages = _context(task, trajectory.turns, turn.index, fresh=begin == 0)
            cap = self._add(blocks, "context", title, segment, texts, begin, turn.start, cap, messages)
            spoken = [Message("assistant", turn.action.text)]
            title = f"Turn {turn.index + 1}"
            if turn.index < len(advantages):
                title += f", advantage {advantages[turn.index]:+.3f}"
            cap = self._add(blocks, "agent", title, segment, texts, turn.start, turn.stop, cap, spoken)
            blocks[-1].update(_action(turn))
            begin = turn.stop
        if not trajectory.turns and trajectory.segments:
            segment = trajectory.segments[0]
            texts = self._texts(segment)
            self._add(blocks, "context", "Prompt", segment, texts, 0, len(segment), cap, task.prompt)
        elif trajectory.turns and trajectory.turns[-1].observation:
            last = [_message(m) for m in trajectory.turns[-1].observation]
            blocks.append(
                {"kind": "context", "title": "Last observation (not read by the policy)", "messages": last}
            )
        return blocks

    def _texts(self, segment: Segment) -> list[str]:
        """Texts of the tokens that can be shown; none without a tokenizer."""
        if self._decode is None:
            return []
        ids = [int(token) for token in segment.tokens[:MAX_EPISODE_TOKENS]]
        return token_texts(self._decode, ids, self._memory)

    def _add(
        self,
        blocks: list[Record],
        kind: str,
        title: str,
        segment: Segment,
        texts: Sequence[str],
        begin: int,
        end: int,
        cap: int,
        messages: Sequence[Message],
    ) -> int:
        """Append one block; returns how many more tokens the episode may show."""
        block: Record = {"kind": kind, "title": title}
        blocks.append(block)
        if self._decode is None:
            block["messages"] = [_message(message) for message in messages]
            self._left -= end - begin
            return max(0, cap - (end - begin))
        stop = max(begin, min(end, begin + cap, len(texts)))
        places = range(begin, stop)
        block["tokens"] = [self._index(int(segment.tokens[i]), texts[i]) for i in places]
        block["provenance"] = "".join(str(int(segment.provenance[i])) for i in places)
        sampled = [i for i in places if segment.provenance[i] == Provenance.SAMPLED]
        block["logprobs"] = [round(float(segment.logprobs[i]), 3) for i in sampled]
        block["omitted"] = end - stop
        self._left -= stop - begin
        return cap - (stop - begin)

    def _index(self, token: int, text: str) -> int:
        return self._vocabulary.setdefault((token, text), len(self._vocabulary))


def _context(task: Task, turns: Sequence[Turn], index: int, *, fresh: bool) -> tuple[str, Sequence[Message]]:
    """What stands before a turn: its title, and its messages for the case without tokens."""
    if index == 0:
        return "Prompt", task.prompt
    before = next((turn for turn in turns if turn.index == index - 1), None)
    observed = before.observation if before is not None else ()
    return ("History rendered anew (new segment)" if fresh else "Observation"), observed


def _action(turn: Turn) -> Record:
    """How the turn was read: calls, what could not be read, results."""
    action = turn.action
    return {
        "finish": action.finish.value,
        "calls": [_call(call) for call in action.tool_calls[:20]],
        "malformed": [f"{clip(m.text, _SHORT)} ({m.reason})" for m in action.malformed[:20]],
        "results": [
            {"name": clip(r.name, 80), "ok": r.ok, "content": clip(r.content, _SHORT)}
            for r in turn.tool_results[:20]
        ],
        "reward": turn.step_reward,
    }


def _call(call: ToolCall) -> str:
    return clip(f"{call.name}({json.dumps(to_plain(call.arguments), ensure_ascii=False)})", 2 * _SHORT)


def _message(message: Message) -> Record:
    return {
        "role": message.role,
        "content": clip(message.content, _TEXT),
        "calls": [_call(call) for call in message.tool_calls[:20]],
    }


def _score(score: Any) -> Record:
    if isinstance(score, Scored):
        tier = score.trust.name.lower()
        return {
            "name": score.name,
            "value": score.value,
            "trust": tier,
            "evidence": clip(score.evidence, _SHORT),
        }
    return {"name": score.name, "reason": clip(score.reason, _SHORT)}


def _plain_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(to_plain(value), ensure_ascii=False)
