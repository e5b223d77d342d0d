"""The reward audit: whether the rewards of a recipe, joined as the recipe joins them, may be trained on.

Gold must be paid; policies that know nothing and known exploits must not. It plays real episodes without
any model. This module must not know recipes, runs or how a table is shown.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import comb
from typing import Any, Literal, TypeVar, cast

from surefoot.audit.checks import best_value
from surefoot.audit.exploits import (
    Shape,
    answer_shape,
    gold_text,
    hack_matrix,
    null_policies,
    plain_reference,
)
from surefoot.audit.play import Played, Policy, record
from surefoot.core.deadlines import DeadlineExceeded, Worker, WorkerPool
from surefoot.core.errors import ConfigError, DataError, SurefootError, describe, nearest
from surefoot.core.types import Action, Message, Score, Scored, Task, Trust, Unscored
from surefoot.envs.base import Environment
from surefoot.rewards.base import Episode, Reward
from surefoot.rewards.suite import Outcome, RewardSuite, Truncated

T = TypeVar("T")
Side = Literal["gold", "null", "exploit"]
Script = Sequence[Action] | Policy
Attempt = tuple[Side, str, Script]  # what it tries, its kind, and how it plays

RETURN = "return"  # the row of the composed return, and its key among overrides
# A policy that knows nothing may be paid on one task in ten by luck. It is caught when that much luck
# would give as many hits in fewer than one audit of twenty.
_LUCK, _RARE = 0.1, 0.05
_TIE = 1e-9
_AT_ONCE = 8
_LONGEST = 20_000
_MOST_LISTED = 6
# Changes that an answer format may forbid: a reward that bears one on some gold must bear it on all.
_STYLE = ("final_period", "spoken_calls")
_OPTION = re.compile(r"^[ \t]*(?:[-*•]|\(?[A-Za-z0-9]{1,2}[).:])[ \t]+(\S.*?)[ \t]*$", re.MULTILINE)


class AuditFailed(SurefootError):
    """A reward failed its audit, and no override says why it may be trained on all the same."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Tally:
    """``hits`` of ``tried`` episodes."""

    hits: int
    tried: int

    def __str__(self) -> str:
        return f"{self.hits}/{self.tried}"


Tallies = Mapping[str, Tally]


@dataclass(frozen=True, slots=True)
class RewardAudit:
    """The row of one reward, or of the composed return. ``ok`` is None where it was not audited.

    ``gold``: oracle episodes scored. ``false_rejects``: by kind of gold episode, those not paid in full.
    ``nulls`` and ``exploits``: by kind, those paid like gold. ``strict``: harmless changes that it
    refuses on every gold episode, as an answer format may.
    """

    name: str
    trust: str
    ok: bool | None
    detail: str
    gold: int = 0
    unscored: int = 0
    false_rejects: Tallies = field(default_factory=dict[str, Tally])
    nulls: Tallies = field(default_factory=dict[str, Tally])
    exploits: Tallies = field(default_factory=dict[str, Tally])
    strict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Audit:
    """All rows, the one of the return last, and notes on what could not be played."""

    environment: str
    tasks: int
    rewards: tuple[RewardAudit, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when no row failed; rows that were not audited do not count."""
        return not self.failed

    @property
    def failed(self) -> tuple[RewardAudit, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rewards if row.ok is False)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ok": self.ok}


def audit_rewards(
    suite: RewardSuite, cls: type[Environment], *, tasks: int = 12, seed: int = 0, seconds: float = 30.0
) -> Audit:
    """Score gold, null policies and exploits on ``tasks`` train tasks with every reward and with the return.

    A verified reward must pay gold in full, also under changes that mean nothing and for the actions of
    ``cls.equivalents(task)`` where the class has that; every reward must give a number; the reward that
    defines success must pay no exploit, and null policies no more than luck explains. The return of an
    episode without success must stay below the oracle's. Prices, learned and group rewards are judged by
    the return. An episode that takes longer than ``seconds``, or raises, is left out and noted.

    Raises ConfigError when ``tasks`` < 1, DataError when there is none; not callable inside a running
    event loop. The exploits are those of :mod:`surefoot.audit.exploits`.
    """
    if tasks < 1:
        raise ConfigError(f"audit.tasks is {tasks}; an audit needs at least 1")
    return asyncio.run(_Auditor(suite, cls, tasks, seed, seconds).report())


def check_overrides(overrides: Mapping[str, str], names: Iterable[str]) -> None:
    """Raises ConfigError for an override that names no reward."""
    known = [*names, RETURN]
    for name in overrides:
        if name not in known:
            raise ConfigError(f"audit.override.{name}: no such reward; {nearest(name, known)}")


def admit(audit: Audit, overrides: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """What a run has to write down: (kind, fields) of events, each with a ``message``.

    Raises AuditFailed for a reward that may not be trained on.
    """
    refused = [row for row in audit.failed if row.name not in overrides]
    if refused:
        lines = "".join(f"\n  {row.name}: {row.detail}" for row in refused)
        raise AuditFailed(
            f"the rewards fail their audit on {audit.environment}:{lines}\n"
            "`surefoot audit` shows the whole table. Mend what it names, or say why it may be trained on: "
            f'audit.override.{refused[0].name} = "the reason"'
        )
    found = [event for row in audit.rewards if (event := _event(row, overrides)) is not None]
    return found + [("audit_note", {"message": note}) for note in audit.notes]


def _event(row: RewardAudit, overrides: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    fields = {"reward": row.name}
    reason = overrides.get(row.name)
    if row.ok is False and reason is not None:
        message = f"{row.name} fails its audit ({row.detail}) and is trained on all the same: {reason}"
        return "audit_override", {**fields, "failure": row.detail, "reason": reason, "message": message}
    if row.ok is None:
        return "not_audited", {
            **fields,
            "reason": row.detail,
            "message": f"{row.name} is not audited: {row.detail}",
        }
    if reason is not None:
        return "audit_note", {**fields, "message": f"audit.override.{row.name} is not needed: it passes"}
    return None


# -------------------- what is played


@dataclass(frozen=True, slots=True)
class _Trial:
    """One scored episode: what it tries and what it got."""

    side: Side
    kind: str
    task: Task
    outcome: Outcome

    @property
    def luck_counts(self) -> bool:
        """False for a null policy on a task that states its answer: it may solve that."""
        return self.side != "null" or self.task.metadata.get("needs_call") is not False


def _benign(actions: Sequence[Action]) -> list[tuple[str, Sequence[Action]]]:
    """Gold with changes that mean nothing, where it ends with a text or calls a tool in silence."""
    changed: list[tuple[str, Sequence[Action]]] = []
    *before, last = actions
    if last.text.strip() and not last.tool_calls:
        texts = {"spaces_around": f"  {last.text}  ", "lines_around": f"\n{last.text}\n\n"}
        if last.text.rstrip()[-1].isalnum():
            texts["final_period"] = f"{last.text.rstrip()}."
        changed += [(kind, [*before, replace(last, text=text)]) for kind, text in texts.items()]
    if any(action.tool_calls and not action.text for action in actions):
        spoken = [replace(a, text=a.text or "Let me look.") if a.tool_calls else a for a in actions]
        changed.append(("spoken_calls", spoken))
    return changed


def _gold(cls: type[Environment], task: Task) -> list[tuple[str, Script]]:
    """Every script that must be paid: the oracle's, what equals it, and what the environment declares."""
    actions = cls.oracle(task)
    if not actions:
        return []
    others = (("equivalent", item) for item in cls.equivalents(task))
    return [("oracle", actions), *_benign(actions), *others]


def _more_nulls(shape: Shape, answers: Mapping[str, str]) -> dict[str, Policy]:
    """Null policies beside those of the checks; ``answers``: those of the audited tasks, by task id."""

    def copy_prompt(task: Task, messages: Sequence[Message]) -> Action:
        return Action("\n".join(message.content for message in task.prompt))

    def longest(task: Task, messages: Sequence[Message]) -> Action:
        shown = "\n".join(message.content for message in messages) or "a"
        return Action((shown + "\n") * (_LONGEST // (len(shown) + 1) + 1))

    def all_options(task: Task, messages: Sequence[Message]) -> Action:
        listed = [text for message in task.prompt for text in _OPTION.findall(message.content)]
        known = listed or [text for owner, text in answers.items() if owner != task.id]
        return Action("\n".join(shape.fill(text) for text in dict.fromkeys(known)))

    return {"copy_prompt": copy_prompt, "longest": longest, "all_options": all_options}


class _Auditor:
    """Plays and scores the episodes of one audit."""

    def __init__(
        self, suite: RewardSuite, cls: type[Environment], tasks: int, seed: int, seconds: float
    ) -> None:
        self.given, self.cls, self.seconds = suite, cls, seconds
        found = list(islice(cls.tasks("train", "base", seed=seed, limit=tasks + 1), tasks + 1))
        if not found:
            raise DataError(f"{cls.name} has no train tasks of variant 'base'")
        self.tasks = found[:tasks]
        self.spare = found[-1]  # its answer is known to null policies; with one task only, it is that one
        self.asking = {r.name: where for r in suite.rewards if (where := _endpoint(r))}
        self.suite = _offline(suite, self.asking)
        self.pool = WorkerPool()
        self.faults: list[str] = []

    async def report(self) -> Audit:
        try:
            trials = await self._trials() if self.suite is not None else []
        finally:
            self.pool.close()
            if self.suite is not None:
                self.suite.pool.close()
        judge = _Judge(self.suite.rewards if self.suite else (), self.cls.success_reward(), trials)
        rows = [
            _not_audited(reward, f"asks {self.asking[reward.name]}, which an audit does not")
            if reward.name in self.asking
            else judge.row(reward)
            for reward in self.given.rewards
        ]
        why_not = _return_unknown(self.given, self.asking)
        rows.append(RewardAudit(RETURN, "", None, why_not) if why_not else judge.returns())
        return Audit(self.cls.name, len(self.tasks), tuple(rows), tuple(self._notes(trials)))

    def _notes(self, trials: Sequence[_Trial]) -> list[str]:
        notes: list[str] = []
        if self.suite is not None and not any(trial.side == "gold" for trial in trials):
            notes.append("gold was not checked: no oracle episode could be played")
        if self.faults:
            notes.append(f"{len(self.faults)} episodes could not be played; the first: {self.faults[0]}")
        return notes

    async def _trials(self) -> list[_Trial]:
        (opening,) = await self._played(self.spare, [("null", "opening", [])])
        if opening is None:
            return []
        nulls = await self._guarded("null policies", self.spare, lambda: self._nulls(opening)) or {}
        free = asyncio.Semaphore(_AT_ONCE)

        async def of(task: Task) -> list[_Trial]:
            async with free:
                return await self._of_task(task, nulls)

        return [trial for found in await asyncio.gather(*map(of, self.tasks)) for trial in found]

    def _nulls(self, opening: Played) -> dict[str, Policy]:
        shape = answer_shape(self.cls, self.spare)
        answers = {t.id: text for t in self.tasks if (text := plain_reference(t)) is not None}
        known = null_policies(shape, self.spare, opening.tools, self.cls.oracle(self.spare))
        return known | _more_nulls(shape, answers)

    async def _of_task(self, task: Task, nulls: Mapping[str, Policy]) -> list[_Trial]:
        """Everything that is tried on one task. Scored together, as a group is in training."""
        (opening,) = await self._played(task, [("null", "opening", [])])
        if opening is None:
            return []
        scripts = await self._scripts(task, nulls, opening)
        found = zip(scripts, await self._played(task, scripts), strict=True)
        tried = [(script, played.episode) for script, played in found if played is not None]
        outcomes = await self._scored([_as_trained(episode, i) for i, (_, episode) in enumerate(tried)])
        pairs = zip(tried, outcomes, strict=True)
        return [_Trial(side, kind, task, outcome) for ((side, kind, _), _), outcome in pairs]

    async def _scripts(self, task: Task, nulls: Mapping[str, Policy], opening: Played) -> list[Attempt]:
        found: list[Attempt] = []

        def add(side: Side, items: Iterable[tuple[str, Script]] | None) -> None:
            found.extend((side, kind, actions) for kind, actions in items or ())

        if task.metadata.get("impossible") is not True:  # what cannot be solved has no gold
            add("gold", await self._guarded("oracle", task, lambda: _gold(self.cls, task)))
        add("null", nulls.items())
        add("exploit", await self._guarded("exploits", task, lambda: self._hacks(task, opening)))
        return found

    def _hacks(self, task: Task, opening: Played) -> list[tuple[str, Script]]:
        other = next((item for item in self.tasks if item.reference != task.reference), self.spare)
        shape, gold = answer_shape(self.cls, other), gold_text(self.cls, task)
        return list(hack_matrix(task, other, shape, gold, opening.tools).items())

    async def _played(self, task: Task, scripts: Sequence[Attempt]) -> list[Played | None]:
        """An episode of each script, None where the environment raised or hung.

        One visit to a worker plays as many as its deadline allows: changing threads for each of them costs
        seconds on a busy machine.
        """
        found: list[Played | None] = []
        while len(found) < len(scripts):
            done: list[Played | None] = []
            left = scripts[len(found) :]
            try:
                await self._in_worker(lambda done=done, left=left: self._play(task, left, done), self.seconds)
            except Exception as error:  # past the deadline, or the thread's end
                done = list(done)  # the thread that was left behind may still add to it
                if not done:  # a whole visit went to one episode
                    self._note(left[0][1], task, error)
                    done.append(None)
            found += done
        return found

    async def _play(self, task: Task, scripts: Sequence[Attempt], done: list[Played | None]) -> None:
        for _, kind, actions in scripts:
            try:
                played = await record(self.cls, task, actions)
            except Exception as error:  # the environment is the user's: what it raises is noted, not hidden
                self._note(kind, task, error)
                played = None
            done.append(played)

    async def _scored(self, episodes: Sequence[Episode]) -> list[Outcome]:
        """In one visit to a worker; when a reward hangs there, once more with a deadline for every call."""
        suite = cast("RewardSuite", self.suite)
        here = copy.copy(suite)
        here.pool = _Here()
        try:
            return await self._in_worker(
                lambda: here.score(episodes), max(reward.seconds for reward in suite.rewards)
            )
        except (DeadlineExceeded, RuntimeError):
            return await suite.score(episodes)

    async def _in_worker(self, call: Callable[[], T | Awaitable[T]], seconds: float) -> T:
        worker = self.pool.acquire()
        try:
            return await worker.call(call, seconds)
        finally:
            self.pool.release(worker)

    async def _guarded(self, what: str, task: Task, call: Callable[[], T]) -> T | None:
        """The result of foreign code, or None after noting what it raised."""
        try:
            return await self._in_worker(call, self.seconds)
        except Exception as error:  # as in _play
            self._note(what, task, error)
            return None

    def _note(self, what: str, task: Task, error: Exception) -> None:
        self.faults.append(f"{what} on task {task.id}: {describe(error)}")


class _Here(WorkerPool):
    """Calls at once, in the thread that asks, without a deadline: the caller has one for the whole batch."""

    def acquire(self) -> Worker:
        return _Caller()


class _Caller(Worker):
    def __init__(self) -> None:
        self.abandoned = True  # there is nothing to hand out again

    async def call(self, function: Callable[[], T | Awaitable[T]], seconds: float) -> T:
        result = function()
        return await cast("Awaitable[T]", result) if inspect.isawaitable(result) else cast("T", result)


def _as_trained(episode: Episode, number: int) -> Episode:
    """With an id of its own, and the answer without the blanks around it, as episodes in training have it."""
    answer = None if episode.answer is None else episode.answer.strip()
    return replace(episode, id=f"{episode.id}-{number}", answer=answer)


# -------------------- what cannot be asked here


def _endpoint(reward: Reward) -> str:
    """The address that a learned reward's function would ask, "" when it holds none."""
    if reward.trust is not Trust.LEARNED:
        return ""
    try:
        closure = inspect.getclosurevars(reward.function)
        held = [*closure.nonlocals.values(), *closure.globals.values()]
    except (TypeError, ValueError):  # not a plain function
        held = list(getattr(reward.function, "__dict__", {}).values())
    found = [getattr(value, "base_url", None) for value in held if not inspect.ismodule(value)]
    return next((str(address) for address in found if address), "")


def _offline(suite: RewardSuite, asking: Mapping[str, str]) -> RewardSuite | None:
    """The suite without the rewards that ask an endpoint; None when no reward is left."""
    if not asking:
        return suite
    left = [reward for reward in suite.rewards if reward.name not in asking]
    return RewardSuite(left, truncated=cast("Truncated", suite.truncated)) if left else None


def _return_unknown(suite: RewardSuite, asking: Mapping[str, str]) -> str:
    """Why the return is not known without the rewards that ask, or ""."""
    if not asking:
        return ""
    names = ", ".join(asking)
    if not any(reward.trust is Trust.VERIFIED for reward in suite.rewards):
        return f"without a verified reward it rests on {names}, not audited"
    if suite.compose != "ordered":  # ordered: what asks only orders ties of what was audited
        return f'compose = "{suite.compose}" lets {names} decide, not audited'
    return ""


def _not_audited(reward: Reward, why: str) -> RewardAudit:
    return RewardAudit(reward.name, _tier(reward), None, why)


# -------------------- what is concluded


def _beyond_luck(tally: Tally) -> bool:
    """Whether so many hits are too rare for a policy that has luck on a tenth of the tasks."""
    n = tally.tried
    chance = sum(comb(n, k) * _LUCK**k * (1 - _LUCK) ** (n - k) for k in range(tally.hits, n + 1))
    return tally.hits > 0 and chance < _RARE


def _tallies(trials: Iterable[_Trial], hit: Callable[[_Trial], bool]) -> dict[str, Tally]:
    found: dict[str, list[bool]] = {}
    for trial in trials:
        found.setdefault(trial.kind, []).append(hit(trial))
    return {kind: Tally(sum(hits), len(hits)) for kind, hits in found.items()}


def _listed(tallies: Tallies) -> str:
    found = [f"{kind} {tally}" for kind, tally in tallies.items() if tally.hits]
    more = len(found) - _MOST_LISTED
    return ", ".join([*found[:_MOST_LISTED], *([f"and {more} kinds more"] if more > 0 else [])])


def _caught(nulls: Tallies, exploits: Tallies) -> str:
    """The kinds that count against a reward which must refuse them, "" when there is none."""
    lucky = {kind: tally for kind, tally in nulls.items() if _beyond_luck(tally)}
    return ", ".join(filter(None, (_listed(lucky), _listed(exploits))))


class _Judge:
    """Turns trials into rows."""

    def __init__(self, rewards: Sequence[Reward], success: str, trials: Sequence[_Trial]) -> None:
        self.index = {reward.name: i for i, reward in enumerate(rewards)}
        self.success = next((reward for reward in rewards if reward.name == success), None)
        self.trials = [trial for trial in trials if trial.luck_counts]
        self.gold = [trial for trial in trials if trial.side == "gold"]
        self.oracle = [trial for trial in self.gold if trial.kind == "oracle"]

    def row(self, reward: Reward) -> RewardAudit:
        """What one reward gave, and the conclusion."""
        missing = [s for t in self.trials if isinstance(s := self._score(reward, t), Unscored)]
        if not self.trials:
            return _not_audited(reward, "no episode could be played")
        if reward.trust is Trust.LEARNED and len(missing) == len(self.trials):
            return _not_audited(reward, f"it scores nothing here: {missing[0].reason}")
        row = self._counted(reward, len(missing))
        problems: list[str] = []
        if missing:
            problems.append(f"no score on {len(missing)} of {len(self.trials)} episodes: {missing[0].reason}")
        if refused := _listed(row.false_rejects):
            problems.append(f"gold is not paid in full: {refused}")
        if reward is self.success and (caught := _caught(row.nulls, row.exploits)):
            problems.append(f"paid in full: {caught}")
        return replace(row, ok=not problems, detail="; ".join(problems) or self._praise(reward))

    def returns(self) -> RewardAudit:
        """Whether the return of an episode without success comes up to the oracle's."""
        best = {t.task.id: t.outcome.final.value for t in self.oracle if isinstance(t.outcome.final, Scored)}
        if not best:
            return RewardAudit(RETURN, "", None, "no oracle to compare with")

        targets = self._targets(self.success) if self.success else {}

        def reaches(trial: _Trial) -> bool:
            final = trial.outcome.final
            won = self.success is not None and self._full(self.success, targets, trial)
            return isinstance(final, Scored) and final.value >= best[trial.task.id] - _TIE and not won

        compared = [trial for trial in self.trials if trial.task.id in best]
        nulls = _tallies([t for t in compared if t.side == "null"], reaches)
        exploits = _tallies([t for t in compared if t.side == "exploit"], reaches)
        caught = _caught(nulls, exploits)
        detail = (
            f"without success, as high as the oracle's: {caught}" if caught else "the oracle's is highest"
        )
        return RewardAudit(RETURN, "", not caught, detail, len(best), nulls=nulls, exploits=exploits)

    def _score(self, reward: Reward, trial: _Trial) -> Score:
        return trial.outcome.scores[self.index[reward.name]]

    def _targets(self, reward: Reward) -> dict[str, float]:
        """By task id, what counts as full where it is relative: for a learned reward, and one of a group."""
        if not _relative(reward):
            return {}
        scores = [(trial.task.id, self._score(reward, trial)) for trial in self.oracle]
        return {task: score.value for task, score in scores if isinstance(score, Scored)}

    def _full(self, reward: Reward, targets: Mapping[str, float], trial: _Trial) -> bool:
        score = self._score(reward, trial)
        wanted = targets.get(trial.task.id, best_value(reward))
        return isinstance(score, Scored) and score.value >= wanted - _TIE

    def _counted(self, reward: Reward, unscored: int) -> RewardAudit:
        row = RewardAudit(reward.name, _tier(reward), None, "", len(self.oracle), unscored)
        if reward.weight < 0:
            return row
        targets = self._targets(reward)
        refused: dict[str, Tally] = {}
        if not _relative(reward):
            refused = _tallies(self.gold, lambda trial: not self._full(reward, targets, trial))
        strict = tuple(k for k in _STYLE if k in refused and refused[k].hits == refused[k].tried)
        paid = [
            _tallies(
                [trial for trial in self.trials if trial.side == side],
                lambda trial: self._full(reward, targets, trial),
            )
            for side in ("null", "exploit")
        ]
        rejects = {kind: tally for kind, tally in refused.items() if kind not in strict}
        return replace(row, false_rejects=rejects, nulls=paid[0], exploits=paid[1], strict=strict)

    def _praise(self, reward: Reward) -> str:
        if reward.weight < 0:
            return "a price: judged by the return"
        gold = "gold is paid in full" if self.oracle else "gold was not checked"
        if _relative(reward):
            gold = "always a number"
        return gold if reward is self.success else f"{gold}; does not define success: judged by the return"


def _relative(reward: Reward) -> bool:
    """Whether its values have no fixed top: opinions, and places within a group."""
    return reward.trust is not Trust.VERIFIED or reward.group


def _tier(reward: Reward) -> str:
    return reward.trust.name.lower()
