"""The settings of a run, typed and checked before any work starts.

Unknown keys, wrong types and settings without effect are errors that name the key, the value and
what would be right. Must not load models or environments.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from surefoot.core.errors import ConfigError, nearest
from surefoot.core.types import Sampling, Split
from surefoot.economics.ledger import parse_duration
from surefoot.economics.prices import PriceTable
from surefoot.training.arms import ARMS

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraConfig(_Section):
    """Low-rank adapters (arXiv 2106.09685) in place of full fine-tuning; needs ``surefoot[lora]``."""

    rank: Positive = 16
    alpha: Rate = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelConfig(_Section):
    """The policy: a registry name, ``scratch``, a local folder or a hub id."""

    name: str
    lora: LoraConfig | None = None


class EnvironmentConfig(_Section):
    """A built-in name, ``module:Class`` or ``path/to/file.py[:Class]``."""

    name: str


class LearnedConfig(_Section):
    """A trained reward model, which joins the rewards as ``reward_model``, of tier learned.

    ``path``: its folder, such as ``RUN/reward_model`` of the run that trained it.
    """

    path: Annotated[str, Field(pattern=r"\S")]


class RewardsConfig(_Section):
    """How rewards are joined. ``add`` names further rewards (``module:name`` or ``file.py:name``);
    ``weights`` replaces weights by reward name; ``learned`` is a reward model's.
    """

    compose: Literal["ordered", "gated", "weighted"] = "ordered"
    override: str = ""
    threshold: float | None = None
    truncated: Literal["score", "zero", "mask"] = "score"
    add: tuple[str, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)
    learned: LearnedConfig | None = None


class SamplingConfig(_Section):
    """The distribution of training and evaluation turns."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: Positive = 128

    def build(self) -> Sampling:
        """The core type."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_tokens)


class EngineConfig(_Section):
    """Where turns are sampled. ``concurrency``: most episodes at once. ``deterministic``: batches wait
    for every running episode, so that equal seeds give equal bits.
    """

    kind: Literal["local"] = "local"
    concurrency: Positive = 64
    deterministic: bool = True


class LimitsConfig(_Section):
    """Deadlines (seconds), retries after environment faults, and the highest share of unscored episodes."""

    env_seconds: Rate = 30.0
    engine_seconds: Rate = 1800.0
    retries: Annotated[int, Field(ge=0)] = 1
    max_unscored: Share = 0.2


class LearnerConfig(_Section):
    """Memory: packed tokens at once, vocabulary rows at once, and whether activations are recomputed."""

    tokens_per_batch: Positive = 512
    chunk: Positive = 128
    checkpoint_activations: bool = False


class OptimizerConfig(_Section):
    """AdamW and its schedule."""

    lr: Rate
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Rate = 1.0
    warmup: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class SftStage(OptimizerConfig):
    """Supervised cold start: on demonstrations ("sft") or on the policy's own ("rft",
    "reward_weighted"); only the agent's own tokens are trained.
    """

    kind: Literal["sft"]
    algorithm: str = "sft"
    settings: dict[str, float | int | str] = Field(default_factory=dict)
    episodes: Positive = 24
    epochs: Positive = 1
    batch_size: Positive = 4
    lr: Rate = 5e-5


class RlStage(OptimizerConfig):
    """Reinforcement learning. ``settings`` overrides parts of the algorithm's row; a setting that the
    row ignores is an error. ``teacher``: the model that the algorithm distills from.
    """

    kind: Literal["rl"]
    algorithm: str = "grpo"
    settings: dict[str, float | int | str] = Field(default_factory=dict)
    teacher: str | None = None
    group_size: Annotated[int, Field(ge=2)] = 8
    tasks_per_step: Positive = 8
    steps: Positive = 20
    updates_per_step: Positive = 1
    lr: Rate = 1e-5
    checkpoint_every: Positive = 5

    @model_validator(mode="after")
    def _updates_fit(self) -> RlStage:
        if self.updates_per_step > self.tasks_per_step:
            raise ValueError(
                f"updates_per_step = {self.updates_per_step} exceeds tasks_per_step = {self.tasks_per_step}; "
                "each update needs at least one group"
            )
        return self


class PreferenceStage(OptimizerConfig):
    """Learning from ranked pairs of episodes: of stored ``runs`` (folders), or of ``tasks`` x ``group_size``
    episodes that the policy samples as the stage begins. ``pairs``: most pairs of a task; ``batch_size``:
    pairs an update.
    """

    kind: Literal["preference"]
    algorithm: str = "dpo"
    settings: dict[str, float | int | str] = Field(default_factory=dict)
    runs: tuple[str, ...] = ()
    tasks: Positive = 32
    group_size: Annotated[int, Field(ge=2)] = 8
    pairs: Positive = 4
    batch_size: Positive = 16
    steps: Positive = 10
    lr: Rate = 1e-6
    checkpoint_every: Positive = 5

    @model_validator(mode="after")
    def _one_source(self) -> PreferenceStage:
        unused = sorted({"tasks", "group_size"} & self.model_fields_set) if self.runs else []
        if unused:
            raise ValueError(f"{unused[0]} has no effect beside runs; remove one of them")
        return self


Stage = Annotated[SftStage | RlStage | PreferenceStage, Field(discriminator="kind")]
Learning = RlStage | PreferenceStage


_KINDS: Mapping[str, type[BaseModel]] = {"sft": SftStage, "rl": RlStage, "preference": PreferenceStage}


class EvaluationConfig(_Section):
    """What claims are measured on: ``tasks`` of the base variant and ``variant_tasks`` (default: as many)
    of every other one, ``samples`` each, from ``split``.

    ``seed`` chooses the tasks; it does not change with the run's seed, so runs stay comparable.
    """

    split: Split = "test"
    tasks: Positive = 40
    variant_tasks: Positive | None = None
    samples: Positive = 2
    variants: Literal["all"] | tuple[str, ...] = "all"
    control_variants: Literal["all", "base"] = "base"
    seed: int = 20_000
    level: Annotated[float, Field(gt=0.5, lt=1)] = 0.95


class ControlsConfig(_Section):
    """Arms that repeat every stage after the cold start with a judgement that teaches nothing."""

    arms: tuple[str, ...] = ("permuted",)

    @model_validator(mode="after")
    def _known_once(self) -> ControlsConfig:
        for arm in self.arms:
            if arm not in ARMS:
                raise ValueError(f"arms names {arm!r}, which does not exist; {nearest(arm, ARMS)}")
        if len(set(self.arms)) != len(self.arms):
            raise ValueError(f"arms {list(self.arms)} names one arm twice")
        return self


class MonitorsConfig(_Section):
    """Watches over the treatment's episodes for signs of a cheated reward; they never feed it.

    ``canaries``: planted strings that no honest episode touches. ``held_out``: a second, differently
    written reward (``module:name`` or ``file.py:name``) to compare the trained one with. ``stop_on``:
    kinds of events that end the run.
    """

    canaries: tuple[str, ...] = ()
    held_out: str | None = None
    stop_on: tuple[str, ...] = ()


class AuditConfig(_Section):
    """The audit of the rewards before anything is loaded. ``tasks``: how many it plays.

    ``override``: name of a reward that fails ("return": of the composed return) -> why the run may train
    on it all the same. The reason is kept with the run and shown in its report.
    """

    tasks: Positive = 12
    override: dict[str, Annotated[str, Field(pattern=r"\S")]] = Field(default_factory=dict)


class BudgetConfig(_Section):
    """Limits that stop the run cleanly, with what it has. ``wall`` like "90m" or "2h"."""

    tokens: Positive | None = None
    usd: Rate | None = None
    wall: str | None = None

    @model_validator(mode="after")
    def _wall_reads(self) -> BudgetConfig:
        try:
            self.wall_seconds()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def wall_seconds(self) -> float | None:
        """``wall`` in seconds."""
        return None if self.wall is None else parse_duration(self.wall)


class RunConfig(_Section):
    """A whole run. ``[[stage]]`` tables are run in order; supervised stages come first."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")]
    description: str = ""
    seed: int = 0
    model: ModelConfig
    environment: EnvironmentConfig
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    stage: tuple[Stage, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    controls: ControlsConfig | None = None
    monitors: MonitorsConfig = Field(default_factory=MonitorsConfig)
    audit: AuditConfig = Field(default_factory=AuditConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    prices: PriceTable = Field(default_factory=PriceTable)

    @model_validator(mode="after")
    def _stages_and_controls(self) -> RunConfig:
        kinds = [stage.kind for stage in self.stage]
        if kinds != sorted(kinds, key=lambda kind: kind != "sft"):
            raise ValueError(f"stage kinds are {kinds}; supervised stages come before all others")
        if self.controls is not None and self.controls.arms and not self.learning:
            raise ValueError("controls.arms has no effect without an rl or preference stage; remove it")
        samples = self.learning or any(stage.algorithm != "sft" for stage in self.cold_start)
        if samples and self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0; learning needs a temperature above 0 to explore")
        return self

    @property
    def cold_start(self) -> tuple[SftStage, ...]:
        """The supervised stages."""
        return tuple(stage for stage in self.stage if isinstance(stage, SftStage))

    @property
    def learning(self) -> tuple[Learning, ...]:
        """The stages after the cold start, which every control arm repeats."""
        return tuple(stage for stage in self.stage if not isinstance(stage, SftStage))

    @property
    def arms(self) -> tuple[str, ...]:
        """Control arms to run."""
        return self.controls.arms if self.controls is not None and self.learning else ()


def parse_config(text: str, *, source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read TOML, apply ``a.b=c`` overrides, check everything. Raises ConfigError."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in _explain(error, data))) from error


def load_config(path: Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from error
    return parse_config(text, source=str(path), overrides=overrides)


def to_toml(config: RunConfig) -> str:
    """The resolved settings as TOML that :func:`parse_config` reads back to the same value."""
    import tomlkit

    data = config.model_dump(mode="json", exclude_none=True)
    # Prices that nobody set stay unset: they are stated as assumptions, and some do not go together.
    data["prices"] = config.prices.model_dump(mode="json", exclude_unset=True)
    return tomlkit.dumps(data)


def _apply(data: dict[str, Any], override: str) -> None:
    """``stage.rl.steps=3`` sets a key; stages are named as by :func:`_stages`."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r} is not of the form a.b=value")
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    parts = key.strip().split(".")
    target: Any = data
    for i, part in enumerate(parts[:-1]):
        target = _enter(target, part, ".".join(parts[: i + 1]), override)
    if not isinstance(target, dict):
        raise ConfigError(f"--set {override!r}: {'.'.join(parts[:-1])} is not a table")
    target[parts[-1]] = value


def _enter(target: Any, part: str, where: str, override: str) -> Any:
    if isinstance(target, list):
        items = cast("list[dict[str, Any]]", target)
        if part.isdigit() and int(part) < len(items):
            return items[int(part)]
        named = [item for item in items if item.get("kind") == part]
        if len(named) != 1:
            valid = ", ".join(address + note for address, note in _stages(items))
            raise ConfigError(f"--set {override!r}: {where} names {len(named)} stages; valid: {valid}")
        return named[0]
    if not isinstance(target, dict):
        raise ConfigError(f"--set {override!r}: {where} is not a table")
    return cast("dict[str, Any]", target).setdefault(part, {})


def _stages(items: Sequence[Any]) -> list[tuple[str, str]]:
    """How --set names each stage, and which one that is: by its kind where it is the only one of it, else by
    its number from 0, with its place counted from 1 beside it, since a number alone can be read both ways.
    """
    tables = [cast("dict[str, Any]", item) if isinstance(item, dict) else {} for item in items]
    kinds = [table.get("kind") for table in tables]
    return [
        (f"stage.{kind}", "")
        if isinstance(kind, str) and kinds.count(kind) == 1
        else (f"stage.{i}", f" (stage {i + 1}, {kind})" if kind else f" (stage {i + 1})")
        for i, kind in enumerate(kinds)
    ]


def _explain(error: ValidationError, data: Mapping[str, Any]) -> list[str]:
    return [_line(item, data) for item in error.errors()]


def _line(item: Any, data: Mapping[str, Any]) -> str:
    where, note = _place(item["loc"], data)
    if item["type"] == "extra_forbidden":
        near = nearest(str(item["loc"][-1]), _fields_at(item["loc"]))
        return f"unknown key {where!r}{note}; {near}"
    if item["type"] == "missing":
        return f"{where!r}{note} is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}"
    if isinstance(item.get("input"), Mapping):
        return f"{where}{note}: {message}" if where else message
    return f"{where} = {item.get('input')!r}{note}: {message}"


def _place(location: Sequence[Any], data: Mapping[str, Any]) -> tuple[str, str]:
    """A key as --set names it, and which stage that is where its name does not say so."""
    match location:
        case ("stage", int(number), *rest):
            address, note = _stages(data["stage"])[number]
            inner = rest[1:] if rest and rest[0] in _KINDS else rest
            return ".".join([address, *map(str, inner)]), note
        case _:
            return ".".join(map(str, location)), ""


def _fields_at(location: Sequence[Any]) -> list[str]:
    """The valid keys of the table that ``location``'s last part stands in."""
    model: Any = RunConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        if part in _KINDS:
            model = _KINDS[cast("str", part)]
            continue
        field = model.model_fields.get(part)
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if _is_model(a)] if field else []
        model = inner[0] if inner else model
    return list(model.model_fields)


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)
