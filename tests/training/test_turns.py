"""A critic that reads what the policy never sees: it ranks better for it, and nothing of it leaks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import ConfigError
from surefoot.core.types import (
    Action,
    Cost,
    Group,
    Message,
    Provenance,
    Sampling,
    Scored,
    Segment,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
)
from surefoot.engines.base import Sample, SampleRequest
from surefoot.engines.local import LocalEngine
from surefoot.learner import learner as learning
from surefoot.learner.batch import Example
from surefoot.learner.learner import Learner, OptimizerSettings
from surefoot.policy.forward import install
from surefoot.policy.rendering import Codec, make_codec
from surefoot.policy.scratch import build_scratch
from surefoot.runs.directory import RunDirectory
from surefoot.runs.files import read_json_lines
from surefoot.runs.store import TrajectoryStore
from surefoot.training.algorithms import ALGORITHMS
from surefoot.training.companions import Beside
from surefoot.training.config import parse_config
from surefoot.training.run import start_run
from surefoot.training.signal import read_batch
from surefoot.training.turns import TurnCritic, informed, turn_example

TINY = Path(__file__).with_name("tiny.py")
CANARY = "canary-5e1fac"
RECIPE = """
name = "taint"
model.name = "scratch"
environment.name = "{path}"
sampling.max_tokens = 6
audit.override.even_length = "luck must pay"

[[stage]]
kind = "rl"
algorithm = "sweet_rl"
group_size = 4
tasks_per_step = 2
steps = 2
lr = 1e-3

[stage.settings]
value_lr = 1e-3
candidates = 4

[evaluation]
tasks = 2
samples = 1
"""


# the critic -----------------------------------------------------------------------------------------

LETTERS = "ab"


class Hidden:
    """Only a turn that says the hidden letter helps; no prompt tells which it is."""

    name = "hidden"

    @classmethod
    def privileged(cls, task: Task) -> str:
        return str(task.reference)


def played(codec: Codec, task: Task, name: str, says: str) -> Trajectory:
    """One turn for each letter of ``says``; it succeeds when the first is the hidden one."""
    tokens = codec.start(task.prompt).tolist()
    provenance = [Provenance.PROMPT] * len(tokens)
    turns: list[Turn] = []
    for k, letter in enumerate(says):
        own = codec.encode_action(Action(letter)).tolist()
        turns.append(Turn(k, 0, len(tokens), len(tokens) + len(own), Action(letter)))
        tokens += own
        provenance += [Provenance.SAMPLED] * len(own)
    sampled = np.array(provenance) == Provenance.SAMPLED
    segment = Segment(
        np.array(tokens, np.int32),
        np.array(provenance, np.uint8),
        np.where(sampled, -1.0, np.nan).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
    )
    final = Scored(float(says[0] == task.reference), Trust.VERIFIED, "r")
    return Trajectory(
        name, task.id, task.id, (segment,), tuple(turns), StopReason.ANSWERED, True, False,
        Cost(), Sampling(), 0, scores=(final,), final=final,
    )  # fmt: skip


def hidden_groups(codec: Codec) -> list[Group]:
    tasks = [Task(f"t{x}", "train", "base", (Message("user", "?"),), reference=x) for x in LETTERS]
    says = [first + second for first in LETTERS for second in "xy"]
    return [Group(t, tuple(played(codec, t, f"{t.id}/{s}", s) for s in says)) for t in tasks]


def trained(privileged: str, *, rounds: int) -> tuple[TurnCritic, list[Group]]:
    """A critic after ``rounds`` steps on the same episodes."""
    loaded = build_scratch(seed=0)
    install(loaded.model)
    codec = make_codec(loaded)
    settings = {"privileged": privileged, "value_lr": 3e-3, "critic_epochs": 4}
    row = ALGORITHMS["sweet_rl"].with_settings(settings)
    learner = Learner(loaded.model, OptimizerSettings(), total_updates=1)
    config = parse_config(RECIPE.format(path=TINY), source="test")
    beside = Beside(row, learner, config, teacher=None, steps=rounds)
    groups = hidden_groups(codec)
    session: Any = SimpleNamespace(cls=Hidden, codec=codec, loaded=loaded)
    critic = TurnCritic(session, row.settings, beside, {g.task.id: g.task for g in groups})
    batch = read_batch(groups, arm="treatment", seed=0, won=lambda t: t.value)
    for _ in range(rounds):
        critic.learn(batch)
    return critic, groups


def leads(critic: TurnCritic, groups: list[Group]) -> tuple[list[float], list[float]]:
    """By task: A of the turn that says the hidden letter over the other, and of x over y after it."""
    helpful: list[float] = []
    idle: list[float] = []
    for group in groups:
        says = {t.id.split("/")[1]: t for t in group.trajectories}
        hit, miss = (str(group.task.reference), next(x for x in LETTERS if x != group.task.reference))
        turns = [(says[hit + "x"], 0), (says[miss + "x"], 0), (says[hit + "x"], 1), (says[hit + "y"], 1)]
        examples = [turn_example(t, t.turns[k]) for t, k in turns]
        a = critic.advantages(examples, [group.task.id] * len(examples)).tolist()
        helpful.append(a[0] - a[1])
        idle.append(a[2] - a[3])
    return helpful, idle


def test_an_untrained_critic_has_nothing_to_say() -> None:
    critic, groups = trained("given", rounds=0)
    helpful, idle = leads(critic, groups)
    assert helpful == [0.0, 0.0] and idle == [0.0, 0.0]


def test_only_a_critic_with_the_privileged_text_ranks_turns_by_the_hidden_state() -> None:
    helpful, idle = leads(*trained("given", rounds=15))
    assert min(helpful) > 0.1, "in each task the turn that says the hidden letter leads"
    assert max(map(abs, idle)) < min(helpful) / 2, "a turn that changes nothing gets little of the credit"
    blind, _ = leads(*trained("withheld", rounds=15))
    assert min(blind) < 0.01, "what helps in one task hurts in the other, and the prompts are the same"


# taint ----------------------------------------------------------------------------------------------


def example() -> Example:
    tokens = np.array([5, 6, 7, 8, 9], np.int32)
    mask = np.array([False, False, True, False, True])
    return Example(((tokens, mask),), np.zeros(2, np.float32), np.zeros(2), np.array([1, 1]))


def test_the_critics_example_is_a_copy_with_the_text_before_it() -> None:
    own, preamble = example(), np.array([1, 2, 3], np.int32)
    read = informed(own, preamble)
    assert read.segments[0][0].tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert np.flatnonzero(read.segments[0][1]).tolist() == [5, 7] and read.trained == own.trained
    assert own.segments[0][0].tolist() == [5, 6, 7, 8, 9]


def test_scoring_the_critics_examples_moves_no_log_prob_of_the_policy() -> None:
    model = build_scratch(seed=0).model
    install(model)
    learner = Learner(model, OptimizerSettings(), total_updates=1)
    before = learner.frozen_scores([example()], Sampling())[0][0]
    told = learner.frozen_scores([informed(example(), np.array([1, 2, 3], np.int32))], Sampling())[0][0]
    after = learner.frozen_scores([example()], Sampling())[0][0]
    assert np.array_equal(before, after)
    assert not np.allclose(before, told), "a text that changes nothing would prove nothing"


def recipe(tmp_path: Path, *overrides: str) -> Any:
    path = tmp_path / "secret.py"
    path.write_text(TINY.read_text().replace('f"hidden {task.reference}"', f'"{CANARY}"'))
    return parse_config(RECIPE.format(path=path), source="test", overrides=overrides)


def test_the_privileged_text_is_in_the_critics_examples_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = make_codec(build_scratch(seed=0))
    forwards: list[tuple[int, bool]] = []  # (model, whether a token sequence held the canary)
    actors: set[int] = set()
    requests: list[str] = []
    score, sample = learning.score_tokens, LocalEngine.sample

    def scored(model: Any, examples: Any, *args: Any, **kwargs: Any) -> Any:
        texts = [codec.decode(tokens) for item in examples for tokens, _ in item.segments]
        forwards.append((id(model), any(CANARY in text for text in texts)))
        return score(model, examples, *args, **kwargs)

    async def sampled(self: LocalEngine, request: SampleRequest) -> Sample:
        actors.add(id(vars(self)["_model"]))
        requests.append(codec.decode(request.tokens))
        return await sample(self, request)

    monkeypatch.setattr(learning, "score_tokens", scored)
    monkeypatch.setattr(LocalEngine, "sample", sampled)
    out = tmp_path / "run"
    start_run(recipe(tmp_path), out)

    (actor,) = actors
    told = {model for model, canary in forwards if canary}
    assert len(told) == 2, "the critic and its reference read the text"
    assert actor not in told and (actor, False) in forwards
    assert requests and not any(CANARY in text for text in requests)
    store = TrajectoryStore(RunDirectory.open(out, writable=False))
    assert any(name.endswith("-candidates") for name in store.names())
    for name in store.names():
        for group in store.read(name):
            assert CANARY not in repr(group), name
            tokens = [segment.tokens for t in group.trajectories for segment in t.segments]
            assert not any(CANARY in codec.decode(row) for row in tokens), name
    for path in out.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    steps = [m for m in read_json_lines(out / "metrics.jsonl") if m["stage"] == "rl"]
    assert any(m.get("pairs") for m in steps) and any(m.get("critic_pairs") for m in steps)


def test_the_text_changes_no_sampled_token_and_no_log_prob_before_the_first_update(tmp_path: Path) -> None:
    found: dict[str, list[bytes]] = {}
    for privileged in ("given", "withheld"):
        out = tmp_path / privileged
        start_run(recipe(tmp_path, f"stage.rl.settings.privileged={privileged}", "stage.rl.steps=1"), out)
        store = TrajectoryStore(RunDirectory.open(out, writable=False))
        units = ("treatment-rl-000000", "treatment-rl-000000-candidates")
        segments = [s for u in units for g in store.read(u) for t in g.trajectories for s in t.segments]
        found[privileged] = [s.tokens.tobytes() + s.logprobs.tobytes() for s in segments]
    assert found["given"] and found["given"] == found["withheld"]


def test_an_environment_without_privileged_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(TINY.read_text().replace("def privileged", "def something"))
    config = parse_config(RECIPE.format(path=path), source="test")
    with pytest.raises(ConfigError, match=r"sweet_rl.*privileged.*'tiny'.*withheld"):
        start_run(config, tmp_path / "never")


def test_the_arms_whose_successes_say_nothing_rank_nothing(tmp_path: Path) -> None:
    out = tmp_path / "constant"
    start_run(recipe(tmp_path, 'controls.arms=["constant"]'), out)
    steps = [m for m in read_json_lines(out / "metrics.jsonl") if m["arm"] == "constant"]
    assert [m["critic_pairs"] for m in steps] == [0, 0] and not any(m["stepped"] for m in steps)


def test_advantages_are_those_of_the_formula() -> None:
    critic, groups = trained("given", rounds=2)
    t = groups[0].trajectories[0]
    examples = [turn_example(t, turn) for turn in t.turns]
    preamble = critic.session.codec.preamble(str(groups[0].task.reference))
    read = [informed(e, preamble) for e in examples]
    new = critic.critic.frozen_scores(read, Sampling())[0]
    old = critic.beside.scores(critic.beside.reference, read, Sampling())
    want = [float((a - b).mean()) for a, b in zip(new, old, strict=True)]
    got = critic.advantages(examples, [t.task_id] * 2)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))
    assert any(abs(a) > 1e-6 for a in want)
