"""One GRPO step, ours against TRL: same model, same prompts, same number of sampled tokens, fp32, CPU.

Each side runs in a process of its own, in alternating order. A step is 4 prompts x 8 completions of
exactly 52 tokens, random rewards (so that every group is alive), one update of all parameters. TRL
gets the faster of two batch layouts. Usage: ``python benchmarks/step_vs_trl.py [--steps 3] [--rounds 2]``;
TRL lives in ``.benchvenv``, made on the first use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".benchvenv"
PACKAGES = ["trl==1.16.0", "transformers==5.24.0", "datasets", "accelerate", "jmespath"]
PROMPTS, MEMBERS, NEW = 4, 8, 52
SHAPES = {"short": 48, "agent": 220}


def prompts(tokenizer: Any, shape: str) -> list[str]:
    """Texts of exactly SHAPES[shape] tokens; the agent shape opens with a tool's description."""
    tool = (
        "You may call one or more functions to assist with the user query. You are provided with function "
        'signatures: {"type": "function", "function": {"name": "calculator", "description": "Evaluate an '
        'integer expression with + - * // and parentheses.", "parameters": {"type": "object", "properties": '
        '{"expression": {"type": "string", "description": "The expression."}}, "required": ["expression"]}}} '
        "For each function call return a json object with the function name and its arguments. "
    )
    words = "the quick brown fox jumps over a lazy dog while many people watch from old stone bridges"
    texts: list[str] = []
    for seed in range(PROMPTS):
        rng = random.Random(seed)
        text = (tool if shape == "agent" else "") + f"Question {seed}:"
        while len(tokenizer(text)["input_ids"]) < SHAPES[shape]:
            text += " " + rng.choice(words.split())
        texts.append(text)
    return texts


def ours(folder: str, shape: str, steps: int) -> dict[str, Any]:
    """Surefoot's engine and learner."""
    import numpy as np
    import torch

    from surefoot.core.types import Sampling
    from surefoot.credit import group_relative
    from surefoot.engines.base import SampleRequest
    from surefoot.engines.local import LocalEngine
    from surefoot.learner.batch import Example
    from surefoot.learner.learner import Learner, OptimizerSettings
    from surefoot.policy.forward import install
    from surefoot.policy.models import load
    from surefoot.training.algorithms import algorithm
    from surefoot.training.losses import RlLoss

    loaded = load(folder)
    install(loaded.model)
    engine = LocalEngine(loaded.model, context=loaded.context)
    learner = Learner(loaded.model, OptimizerSettings(lr=1e-6), total_updates=steps)
    ids = [np.array(loaded.tokenizer(t)["input_ids"], np.int32) for t in prompts(loaded.tokenizer, shape)]
    sampling = Sampling(max_tokens=NEW)

    async def rollout(step: int) -> list[Any]:
        async def one(i: int, j: int) -> Any:
            sample = await engine.sample(
                SampleRequest(f"{i}/{j}", ids[i], sampling, (), step * 1000 + i * 10 + j)
            )
            engine.leave()
            return sample

        for _ in range(PROMPTS * MEMBERS):
            engine.enter()
        return await asyncio.gather(*(one(i, j) for i in range(PROMPTS) for j in range(MEMBERS)))

    def step(index: int) -> None:
        samples = asyncio.run(rollout(index))
        engine.new_version(index + 1)
        rng = random.Random(index)
        returns = torch.tensor([rng.random() for _ in samples], dtype=torch.float64)
        group = torch.arange(PROMPTS).repeat_interleave(MEMBERS)
        advantages = group_relative(returns, group)
        examples: list[Example] = []
        for k, sample in enumerate(samples):
            prompt = ids[k // MEMBERS]
            tokens = np.concatenate([prompt, sample.tokens])
            mask = np.arange(len(tokens)) >= len(prompt)
            own = np.full(NEW, float(advantages[k]))
            examples.append(Example(((tokens, mask),), sample.logprobs, own, np.array([NEW])))
        report = learner.update(
            examples, RlLoss(algorithm("grpo", {})), sampling=sampling, aggregate="sequence_mean"
        )
        assert report.stepped and report.trained_tokens == PROMPTS * MEMBERS * NEW

    return measure(step, steps)


def trl(folder: str, shape: str, steps: int, layout: str) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same prompts and lengths."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = prompts(tokenizer, shape)
    batch, accumulate = {"whole": (32, 1), "parts": (8, 4)}[layout]
    config = GRPOConfig(
        output_dir="/tmp/surefoot-bench-trl",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        num_generations=MEMBERS,
        max_completion_length=NEW,
        generation_kwargs={"min_new_tokens": NEW},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=steps + 1,
        beta=0.0,
        loss_type="grpo",
        bf16=False,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1000,
        save_strategy="no",
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    rng = random.Random(0)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [rng.random() for _ in completions]

    marks: list[tuple[float, float]] = []
    resident: list[int] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            pass

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))
            resident.append(rss())

    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts * (steps + 2)}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    wall = [b[0] - a[0] for a, b in pairwise(marks)]
    cpu = [b[1] - a[1] for a, b in pairwise(marks)]
    return {"wall": wall, "cpu": cpu, "peak_mb": peak(), "resident_mb": resident}


def measure(step: Any, steps: int) -> dict[str, Any]:
    """One warm-up step, then ``steps`` timed ones."""
    wall: list[float] = []
    cpu: list[float] = []
    resident: list[int] = []
    for index in range(steps + 1):
        began, used = time.perf_counter(), time.process_time()
        step(index)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        resident.append(rss())
    return {"wall": wall[1:], "cpu": cpu[1:], "peak_mb": peak(), "resident_mb": resident}


def rss() -> int:
    """Resident megabytes of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def peak() -> int:
    """Highest resident megabytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def worker(python: str, *arguments: str) -> dict[str, Any]:
    """Run one side in its own process and read its JSON line."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, __file__, "--worker", *arguments], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def bench_python() -> str:
    """TRL's interpreter; its environment is made on the first use."""
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "torch==2.13.0"], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shapes", default="short,agent")
    parser.add_argument("--layouts", default="whole,parts", help="TRL batch layouts to try")
    parser.add_argument("--trl-python", default="")
    parser.add_argument("--worker", nargs="+")
    given = parser.parse_args()
    if given.worker:
        side, folder, shape, steps = given.worker[:4]
        run = ours(folder, shape, int(steps)) if side == "ours" else trl(folder, shape, int(steps), side)
        print(json.dumps(run))
        return
    peer = given.trl_python or bench_python()
    compare(given.shapes.split(","), given.steps, given.rounds, peer, given.layouts.split(","))


def compare(shapes: list[str], steps: int, rounds: int, peer: str, layouts: list[str]) -> None:
    """Alternate the sides, print and keep the ratios."""
    sys.path.insert(0, str(Path(__file__).parent))
    from common import keep, ratio_interval

    from surefoot.policy.models import pull

    folder = str(pull("smollm2-135m"))
    result: dict[str, Any] = {"steps": steps, "rounds": rounds, "shapes": {}}
    for shape in shapes:
        trial = {layout: worker(peer, layout, folder, shape, "1") for layout in layouts if len(layouts) > 1}
        layout = min(trial, key=lambda name: statistics.median(trial[name]["wall"]), default=layouts[0])
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for turn in range(rounds):
            order = ("ours", "trl") if turn % 2 == 0 else ("trl", "ours")
            for side in order:
                python, name = (sys.executable, "ours") if side == "ours" else (peer, layout)
                runs[side].append(worker(python, name, folder, shape, str(steps)))
        figures = {
            key: {side: [value for run in runs[side] for value in run[key]] for side in runs}
            for key in ("wall", "cpu")
        }
        record: dict[str, Any] = {
            "trl_layout": layout,
            "trl_layouts_tried": {
                name: {k: run[k] for k in ("wall", "peak_mb")} for name, run in trial.items()
            },
            "peak_mb": {side: max(run["peak_mb"] for run in runs[side]) for side in runs},
            "resident_mb": {side: [run["resident_mb"] for run in runs[side]] for side in runs},
        }
        for key, sides in figures.items():
            middle, low, high = ratio_interval(sides["trl"], sides["ours"])
            record[key] = {**sides, "ratio": middle, "ratio_ci": [low, high]}
            mine, theirs = (statistics.median(sides[side]) for side in ("ours", "trl"))
            print(f"{shape:6s} {key:5s} ours {mine:6.2f} s  TRL {theirs:6.2f} s  ", end="")
            print(f"ratio {middle:.2f} [{low:.2f}, {high:.2f}]")
        memory = record["peak_mb"]
        share = memory["ours"] / memory["trl"]
        print(f"{shape:6s} peak  ours {memory['ours']} MB  TRL {memory['trl']} MB  share {share:.2f}")
        result["shapes"][shape] = record
    print("kept in", keep("step_vs_trl", result))


if __name__ == "__main__":
    main()
