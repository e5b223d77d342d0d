"""``--dry-run``: what a run would do, and a rough estimate of tokens, time, memory, disk and money.

Loads no model. Every rate behind an estimate is stated in the plan, since none was measured here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from surefoot.cli.doctor import cores, memory
from surefoot.cli.output import duration, new_table, say, show, size
from surefoot.economics import money

if TYPE_CHECKING:
    from surefoot.core.types import Task
    from surefoot.envs.base import Environment
    from surefoot.training.config import PreferenceStage, RlStage, RunConfig

# Rough figures, deliberately on the slow side of a recent laptop core.
GFLOPS_SAMPLING = 25.0  # a core; one token an episode at a time
GFLOPS_UPDATE = 60.0  # a core; whole sequences
SECONDS_PER_MODEL_CALL = 0.012
SECONDS_PER_UPDATE = 0.08
TOKENS_PER_BYTE = 0.3
TURN_FRAME_TOKENS = 8
_FLOAT = 4  # bytes; weights, gradients and optimiser state are float32
_SAMPLED_TASKS = 8
_KEPT_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class _Size:
    """What is known of a model without loading it; zero layers: only the count of parameters."""

    parameters: float
    basis: str
    vocabulary: int = 0
    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    kv_width: int = 0
    trained: float = 0.0


@dataclass(frozen=True, slots=True)
class _Shape:
    """Mean tokens of one episode: ``prompt`` is shared by a task's episodes."""

    prompt: float
    observed: float
    sampled: float
    turns: float
    basis: str


@dataclass(frozen=True, slots=True)
class _Work:
    """One line of the plan. ``passes`` counts updates on the episodes, ``drawn`` turns sampled for one."""

    phase: str
    episodes: int
    tasks: int
    steps: int = 0
    sampled: bool = True
    passes: int = 0
    drawn: int = 1


def check(config: RunConfig) -> list[str]:
    """Check all that needs no policy, rewards included; returns what could not be checked here.

    Raises ConfigError and AuditFailed, like the run itself would.
    """
    if importlib.util.find_spec("torch") is None:
        from surefoot.envs.loading import load_environment

        load_environment(config.environment.name)
        return ['rewards, variants and algorithm settings: needs pip install "surefoot[train]"']
    from surefoot.training.progress import Silent
    from surefoot.training.run import audit_config, check_config

    check_config(config)
    return [fields["message"] for kind, fields in audit_config(config, Silent()) if kind == "not_audited"]


def estimate(config: RunConfig, out: Path) -> dict[str, Any]:
    """The plan as plain values; estimates are None where the model's size is not known."""
    from surefoot.envs.loading import load_environment

    cls = load_environment(config.environment.name)
    model, shape = _model_size(config), _episode_shape(config, cls)
    work = _work(config, cls)
    tokens = sum(
        item.episodes * (shape.prompt + shape.observed + shape.sampled * item.drawn) for item in work
    )
    seconds = None if model is None else sum(_seconds(config, item, model, shape) for item in work)
    sampled = sum(item.episodes * shape.sampled * item.drawn for item in work if item.sampled)
    usd = None
    if seconds is not None:
        usd = config.prices.cost(seconds, round(tokens - sampled), 0, round(sampled), model=_priced(config))
    return {
        "name": config.name,
        "out": str(out),
        "seed": config.seed,
        "config": config.model_dump(mode="json", exclude_none=True),
        "phases": [{"phase": w.phase, "steps": w.steps, "episodes": w.episodes} for w in work],
        "arms": ["treatment" if config.learning else "start", *config.arms],
        "episodes": sum(item.episodes for item in work),
        "model": None if model is None else {"parameters": model.parameters, "basis": model.basis},
        "episode": asdict(shape),
        "tokens": round(tokens),
        "seconds": seconds,
        "memory": None if model is None else _memory(config, model, shape),
        "disk_bytes": None if model is None else _disk(config, model, sum(w.episodes for w in work), shape),
        "usd": usd,
        "prices": config.prices.basis(),
        "machine": {"cores": cores(), "memory_bytes": memory()[0]},
        "rates": {
            "gflops_sampling": GFLOPS_SAMPLING,
            "gflops_update": GFLOPS_UPDATE,
            "seconds_per_model_call": SECONDS_PER_MODEL_CALL,
            "seconds_per_update": SECONDS_PER_UPDATE,
            "tokens_per_byte": _tokens_per_byte(config),
        },
        "warnings": _warnings(config, tokens, seconds, usd),
    }


# work -----------------------------------------------------------------------------------------------


def _work(config: RunConfig, cls: type[Environment]) -> list[_Work]:
    """The phases of a run, in the order in which it does them."""
    variants = _variants(config, cls)
    held = {v: _tasks(config, cls, v) for v in variants}
    controls = held if config.evaluation.control_variants == "all" else {"base": held["base"]}
    work = [_evaluation(config, "initial", held)]
    for stage in config.cold_start:
        steps = math.ceil(stage.episodes / stage.batch_size) * stage.epochs
        work.append(
            _Work("start: sft", stage.episodes, stage.episodes, steps, sampled=False, passes=stage.epochs)
        )
    if config.cold_start:
        work.append(_evaluation(config, "start", held))
    if config.learning:
        for arm in ("treatment", *config.arms):
            work += [_learning(arm, stage) for stage in config.learning]
            final = arm == "treatment"
            work.append(_evaluation(config, "final" if final else arm, held if final else controls))
    return work


def _learning(arm: str, stage: RlStage | PreferenceStage) -> _Work:
    from surefoot.training.arms import arm_of

    planned = stage.tasks_per_step * stage.steps if stage.kind == "rl" else stage.tasks
    tasks = 0 if stage.kind == "preference" and stage.runs else planned
    passes = 1 if arm_of(arm).learns else 0
    name = f"{arm}: {stage.algorithm}"
    return _Work(name, tasks * stage.group_size, tasks, stage.steps, passes=passes, drawn=_drawn(stage))


def _drawn(stage: RlStage | PreferenceStage) -> int:
    """Turns sampled for each one that is played; an algorithm's defaults are known only with torch."""
    settings = stage.settings
    if importlib.util.find_spec("torch") is not None:
        from surefoot.training.algorithms import algorithm

        settings = algorithm(stage.algorithm, stage.settings, kind=stage.kind).settings
    return int(settings.get("candidates", 1))


def _evaluation(config: RunConfig, policy: str, held: Mapping[str, int]) -> _Work:
    tasks = sum(held.values())
    return _Work(f"evaluate {policy} on {', '.join(held)}", tasks * config.evaluation.samples, tasks)


def _variants(config: RunConfig, cls: type[Environment]) -> list[str]:
    chosen = config.evaluation.variants
    names = list(cls.variants) if chosen == "all" else ["base", *chosen]
    return sorted(dict.fromkeys(names), key=lambda name: name != "base")


def _tasks(config: RunConfig, cls: type[Environment], variant: str) -> int:
    """A split may hold fewer tasks than the recipe asks for."""
    settings = config.evaluation
    found = cls.tasks(settings.split, variant, seed=settings.seed, limit=settings.tasks)
    return sum(1 for _ in islice(found, settings.tasks))


# tokens ---------------------------------------------------------------------------------------------


def _tokens_per_byte(config: RunConfig) -> float:
    return 1.0 if config.model.name == "scratch" else TOKENS_PER_BYTE


def _episode_shape(config: RunConfig, cls: type[Environment]) -> _Shape:
    """Means over a few train tasks, played by the oracle (or by silence where there is none)."""
    from surefoot.audit.play import record
    from surefoot.core.types import Action

    rate = _tokens_per_byte(config)
    tasks: list[Task] = list(islice(cls.tasks("train", "base", seed=0, limit=_SAMPLED_TASKS), _SAMPLED_TASKS))
    prompt = observed = sampled = turns = 0.0
    known = True
    for task in tasks:
        actions = cls.oracle(task)
        known = known and actions is not None
        played = asyncio.run(record(cls, task, actions or [Action("")]))
        specs = sum(_bytes(item.spec()["function"]) for item in played.tools)
        opening = played.episode.messages[: len(task.prompt)]
        prompt += (specs + sum(_bytes(m.content) for m in opening)) * rate + TURN_FRAME_TOKENS * len(opening)
        for turn in played.episode.turns:
            calls = sum(
                _bytes({"name": c.name, "arguments": dict(c.arguments)}) for c in turn.action.tool_calls
            )
            sampled += (_bytes(turn.action.text) + calls) * rate + TURN_FRAME_TOKENS
            observed += sum(_bytes(m.content) * rate + TURN_FRAME_TOKENS for m in turn.observation)
        turns += len(played.episode.turns)
    count = max(len(tasks), 1)
    if known:
        basis = f"{len(tasks)} oracle episodes"
        return _Shape(prompt / count, observed / count, sampled / count, turns / count, basis)
    guess = max(1.0, cls.horizon / 2)
    half = config.sampling.max_tokens / 2
    basis = "no oracle: half the horizon, half of sampling.max_tokens a turn"
    return _Shape(prompt / count, guess * half, guess * half, guess, basis)


def _bytes(value: object) -> int:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return len(text.encode("utf-8", "replace"))


# model ----------------------------------------------------------------------------------------------


def _model_size(config: RunConfig) -> _Size | None:
    """From the model's config.json, or the count in its name (``135m``), or None."""
    described = _architecture(config.model.name)
    if described is not None:
        return _llama_size(described, config)
    found = re.search(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*([mb])(?![a-z])", config.model.name.lower())
    if found is None:
        return None
    parameters = float(found.group(1)) * (1e6 if found.group(2) == "m" else 1e9)
    trained = parameters if config.model.lora is None else 0.02 * parameters
    return _Size(parameters, "the number in the model's name", trained=trained)


def _architecture(name: str) -> Mapping[str, Any] | None:
    from surefoot.policy.models import list_models
    from surefoot.policy.scratch import SPECIAL_TOKENS, build_scratch

    if name == "scratch":
        own = {key: p.default for key, p in inspect.signature(build_scratch).parameters.items()}
        return {
            "vocab_size": len(SPECIAL_TOKENS) + 256,
            "hidden_size": own["hidden"],
            "intermediate_size": 2 * own["hidden"],
            "num_hidden_layers": own["layers"],
            "num_attention_heads": own["heads"],
            "num_key_value_heads": own["kv_heads"],
            "tie_word_embeddings": True,
        }
    pulled = {item.name: item.path for item in list_models() if item.path is not None}
    folder = pulled.get(name, Path(name).expanduser())
    file = folder / "config.json"
    if not file.is_file():
        return None
    read = json.loads(file.read_text(encoding="utf-8"))
    return cast("Mapping[str, Any]", read.get("text_config", read))


def _llama_size(described: Mapping[str, Any], config: RunConfig) -> _Size | None:
    """Counts the weights of a llama-like decoder; None where the file speaks of something else."""
    try:
        vocabulary, hidden, inner, layers, heads = (
            int(described[key])
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                        "num_attention_heads")
        )  # fmt: skip
    except (KeyError, TypeError):
        return None
    head = int(described.get("head_dim") or hidden // heads)
    kv = int(described.get("num_key_value_heads") or heads) * head
    own = heads * head
    layer = 2 * hidden * own + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    tied = bool(described.get("tie_word_embeddings"))
    total = vocabulary * hidden * (1 if tied else 2) + layers * layer + hidden
    trained = float(total)
    if config.model.lora is not None:
        widths = {"q_proj": own, "o_proj": own, "k_proj": kv, "v_proj": kv}
        sides = sum(hidden + widths.get(target, inner) for target in config.model.lora.targets)
        trained = float(config.model.lora.rank * sides * layers)
    return _Size(float(total), "the model's config", vocabulary, hidden, inner, layers, kv, trained)


# estimates ------------------------------------------------------------------------------------------


def _seconds(config: RunConfig, work: _Work, model: _Size, shape: _Shape) -> float:
    """Arithmetic at the stated rates, plus a fixed time for each call of the model and each update."""
    fresh = work.episodes * (shape.observed + shape.sampled) + work.tasks * shape.prompt
    seconds = 0.0
    if work.sampled:
        steps = max(work.steps, 1)
        rounds = math.ceil(work.episodes / config.engine.concurrency / steps) * steps
        more = work.episodes * shape.sampled * (work.drawn - 1)
        seconds += 2 * model.parameters * (fresh + more) / (GFLOPS_SAMPLING * 1e9 * cores())
        seconds += rounds * shape.sampled * SECONDS_PER_MODEL_CALL
    if work.passes:
        # forward 2 and backward 4 operations a weight and token
        seconds += 6 * model.parameters * fresh * work.passes / (GFLOPS_UPDATE * 1e9 * cores())
        seconds += work.steps * SECONDS_PER_UPDATE
    return seconds


def _memory(config: RunConfig, model: _Size, shape: _Shape) -> dict[str, float]:
    """Bytes: weights, gradients, Adam, activations of one packed batch, vocabulary rows, keys and values."""
    rows = config.learner.tokens_per_batch
    # kept for the backward pass, a token and layer: norms, projections, attention; gate and up
    wide = 12 * model.hidden + 2 * model.intermediate
    kept = (
        model.layers * model.hidden + wide if config.learner.checkpoint_activations else model.layers * wide
    )
    episode = shape.observed + shape.sampled
    parts = {
        "weights": _FLOAT * model.parameters,
        "gradients": _FLOAT * model.trained,
        "adam": 2 * _FLOAT * model.trained,
        "activations": float(_FLOAT * rows * kept),
        "vocabulary": float(3 * _FLOAT * config.learner.chunk * model.vocabulary),
        "keys_values": 2 * _FLOAT * model.layers * model.kv_width * episode * config.engine.concurrency,
    }
    return {**parts, "total": sum(parts.values())}


def _disk(config: RunConfig, model: _Size, episodes: int, shape: _Shape) -> float:
    """Bytes at the fullest: a finished checkpoint of each arm, two unfinished ones, the trajectories."""
    arms = 2 + len(config.arms) if config.learning else 1
    weights, full = _FLOAT * model.trained, 3 * _FLOAT * model.trained
    tokens = episodes * (shape.prompt + shape.observed + shape.sampled)
    return arms * weights + _KEPT_CHECKPOINTS * full + tokens * 13


def _priced(config: RunConfig) -> str | None:
    return config.model.name if len(config.prices.models) > 1 else None


def _warnings(config: RunConfig, tokens: float, seconds: float | None, usd: float | None) -> list[str]:
    budget = config.budget
    limits: tuple[tuple[str, float | None, float | None, Callable[[float], str]], ...] = (
        ("budget.tokens", budget.tokens, tokens, lambda value: f"{value:,.0f}"),
        ("budget.wall", budget.wall_seconds(), seconds, duration),
        ("budget.usd", budget.usd, usd, money),
    )
    return [
        f"{name} = {shown(limit)} would stop the run: about {shown(value)} are needed"
        for name, limit, value, shown in limits
        if limit is not None and value is not None and value > limit
    ]


# words ----------------------------------------------------------------------------------------------


def print_plan(plan: Mapping[str, Any], unchecked: list[str]) -> None:
    """The plan as a table of phases and one of estimates."""
    config = plan["config"]
    say(
        f"{plan['name']}, seed {plan['seed']}: model {config['model']['name']}, environment "
        f"{config['environment']['name']}, arms {', '.join(plan['arms'])}; run folder {plan['out']}"
    )
    table = new_table("phases", "phase", "steps", "episodes", numbers=("steps", "episodes"))
    for item in plan["phases"]:
        table.add_row(item["phase"], str(item["steps"] or ""), f"{item['episodes']:,}")
    show(table)
    show(_estimates(plan))
    for line in plan["warnings"]:
        say(f"warning: {line}", style="yellow")
    for line in unchecked:
        say(f"not checked: {line}", style="yellow")


def _estimates(plan: Mapping[str, Any]) -> Any:
    rates, episode, model = plan["rates"], plan["episode"], plan["model"]
    table = new_table("rough estimates, nothing was measured", "what", "estimate", "rests on")
    table.add_row(
        "tokens",
        f"{plan['tokens']:,}",
        f"{episode['prompt']:.0f} prompt + {episode['observed']:.0f} observed + {episode['sampled']:.0f} "
        f"sampled an episode ({episode['basis']}, {rates['tokens_per_byte']:g} tokens a byte)",
    )
    if model is None:
        table.add_row("time, memory", "unknown", "the model's size is not known before it is fetched")
        return table
    parts = plan["memory"]
    shown = ", ".join(f"{key.replace('_', ' ')} {size(parts[key])}" for key in parts if key != "total")
    table.add_row(
        "time",
        duration(plan["seconds"]),
        f"{plan['machine']['cores']} cores at {rates['gflops_sampling']:g} GFLOP/s sampling and "
        f"{rates['gflops_update']:g} in updates, {1000 * rates['seconds_per_model_call']:g} ms a model call, "
        f"{1000 * rates['seconds_per_update']:g} ms an update; "
        f"{model['parameters'] / 1e6:.3g} million parameters ({model['basis']})",
    )
    table.add_row("memory", size(parts["total"]), f"{shown}; beside Python and its libraries")
    table.add_row("disk", size(plan["disk_bytes"]), "checkpoints kept at once, and trajectories")
    table.add_row("money", money(plan["usd"]), plan["prices"])
    return table
