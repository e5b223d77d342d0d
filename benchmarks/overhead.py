"""What the harness itself costs: start-up, milliseconds a turn without a model, storing, credit, packing.

No peer takes part: the figures are for comparing versions of this package on one machine. Usage:
``python benchmarks/overhead.py``.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import keep

from surefoot.core.types import Finish, Group, Sampling
from surefoot.credit import group_relative
from surefoot.engines.base import Sample, SampleRequest
from surefoot.envs.base import answer, call
from surefoot.envs.calculator import Calculator
from surefoot.policy.rendering import make_codec
from surefoot.policy.scratch import build_scratch
from surefoot.policy.trie import build_trie
from surefoot.rewards.suite import RewardSuite
from surefoot.rollout.episode import Limits
from surefoot.rollout.scheduler import Hooks, Rollouts
from surefoot.runs.directory import Manifest, RunDirectory
from surefoot.runs.store import TrajectoryStore

EPISODES = 200


class Instant:
    """An engine that answers at once: one tool call, then an answer."""

    version, context = 0, 1 << 20

    def __init__(self, codec: Any) -> None:
        self.turns = [
            codec.encode_action(a) for a in (call("calculator", expression="12*34"), answer("Answer: 408"))
        ]
        self.asked: dict[str, int] = {}

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def release(self, session: str) -> None:
        self.asked.pop(session, None)

    def new_version(self, version: int) -> None: ...

    async def sample(self, request: SampleRequest) -> Sample:
        number = self.asked.get(request.session, 0)
        self.asked[request.session] = number + 1
        tokens = self.turns[min(number, 1)]
        return Sample(tokens, np.full(len(tokens), -0.5, np.float32), Finish.STOP, 0)


def timed(work: Callable[[], Any], repeats: int = 7) -> list[float]:
    """Seconds of each repeat; one more is run first and dropped."""
    work()
    out: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        out.append(time.perf_counter() - began)
    return out


def start_up(command: list[str]) -> list[float]:
    """Seconds of a fresh interpreter."""
    return timed(lambda: subprocess.run([sys.executable, *command], check=True, capture_output=True), 5)


def main() -> None:
    codec = make_codec(build_scratch(seed=0))
    engine = Instant(codec)
    rollouts = Rollouts(
        Calculator, codec, engine, RewardSuite(Calculator.rewards), limits=Limits(), concurrency=64
    )
    tasks = list(Calculator.tasks("train", limit=EPISODES))

    def play() -> list[Group]:
        return asyncio.run(
            rollouts.collect(tasks, members=1, sampling=Sampling(), name="b", seed=0, hooks=Hooks())
        )

    groups = play()
    turns = sum(len(t.turns) for g in groups for t in g.trajectories)
    returns = torch.rand(8192, dtype=torch.float64)
    members = torch.arange(1024).repeat_interleave(8)
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 259, 2000)
    long = [np.concatenate([prompt, rng.integers(3, 259, 500)]).astype(np.int32) for _ in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        text = "name = 'overhead'\n"
        manifest = Manifest.current(recipe="overhead", seed=0, config_toml=text)
        with RunDirectory.create(Path(folder) / "run", config_toml=text, manifest=manifest) as run:
            store = TrajectoryStore(run)
            seconds = {
                "import surefoot (s)": start_up(["-c", "import surefoot"]),
                "surefoot --help (s)": start_up(["-m", "surefoot.cli", "--help"]),
                "turn without a model (ms)": [1e3 * s / turns for s in timed(play)],
                "store an episode (ms)": [
                    1e3 * s / EPISODES for s in timed(lambda: store.write("unit", groups))
                ],
                "credit of 8,192 returns (ms)": [
                    1e3 * s for s in timed(lambda: group_relative(returns, members))
                ],
                "pack 64 x 2,500 tokens (ms)": [1e3 * s for s in timed(lambda: build_trie(long))],
            }
    for name, values in seconds.items():
        print(f"{name:32s} median {statistics.median(values):8.3f}  [{min(values):.3f}, {max(values):.3f}]")
    print("kept in", keep("overhead", {"repeats": seconds, "episodes": EPISODES, "turns": turns}))


if __name__ == "__main__":
    main()
