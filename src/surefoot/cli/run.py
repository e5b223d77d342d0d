"""``surefoot run``: start, resume or only plan a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.core.errors import BudgetReached, ConfigError, nearest

if TYPE_CHECKING:
    from surefoot.training.config import RunConfig
    from surefoot.training.run import RunResult

_INTERRUPTED = 130
_OUTCOMES = ("learned", "memorised", "not_shown", "falsified")


@dataclass(frozen=True, slots=True)
class _Request:
    """What the command line asks for, before it is checked."""

    recipe: str
    settings: tuple[str, ...]
    out: Path | None
    seed: int | None
    controls: str | None
    resume: bool

    def overrides(self) -> list[str]:
        """All settings as ``a.b=c``. Raises ConfigError for an unknown arm."""
        items = list(self.settings)
        if self.seed is not None:
            items.append(f"seed={self.seed}")
        if self.controls is not None:
            items.append(f"controls.arms={_arms(self.controls)}")
        return items

    def config(self) -> RunConfig:
        """The recipe with all overrides."""
        from surefoot.recipes import find_recipe
        from surefoot.training.config import load_config

        if (Path(self.recipe) / "manifest.json").is_file():
            raise ConfigError(f"{self.recipe} is a run folder; go on with it by --resume")
        return load_config(find_recipe(self.recipe), overrides=self.overrides())

    def folder(self, config: RunConfig) -> Path:
        """Where the run's files stand."""
        return self.out or Path("runs") / f"{config.name}-seed{config.seed}"

    def existing(self) -> Path:
        """The folder of the run to go on with. Raises ConfigError for flags that would not count."""
        if self.controls is not None:
            raise ConfigError("--controls has no effect with --resume; a run goes on with its own arms")
        if (Path(self.recipe) / "manifest.json").is_file():
            for flag, given in (("--out", self.out), ("--seed", self.seed)):
                if given is not None:
                    raise ConfigError(f"{flag} has no effect: {self.recipe} is the run folder already")
            return Path(self.recipe)
        return self.folder(self.config())


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, a .toml file, or (with --resume) a run.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-seedN.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    controls: Annotated[
        str | None, typer.Option(metavar="ARMS", help="Control arms with commas between, or none.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, show plan and estimates.")] = False,
    require: Annotated[
        str | None, typer.Option(metavar="VERDICT", help="Exit with 1 unless this is the verdict.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.html.")] = False,
) -> None:
    """Train and judge: evaluate, cold start, reinforce, control arms, verdict, report."""
    request = _Request(recipe, tuple(settings or ()), out, seed, controls, resume)
    if require is not None and require not in _OUTCOMES:
        raise ConfigError(f"--require {require!r} is no verdict; {nearest(require, _OUTCOMES)}")
    if dry_run:
        for flag, given in (("--resume", resume), ("--require", require), ("--no-report", no_report)):
            if given:
                raise ConfigError(f"{flag} has no effect with --dry-run")
        _plan(request, json)
        return
    result = _execute(request, json)
    report = None if no_report else _report(result.path)
    _show(result, report, json)
    if result.stopped:
        raise typer.Exit(BudgetReached.exit_code)
    outcome = result.verdict["outcome"] if result.verdict else None
    if require is not None and outcome != require:
        from surefoot.cli.output import complain

        complain(f"the verdict is {outcome or 'missing'}; --require asked for {require}")
        raise typer.Exit(1)


def _arms(text: str) -> list[str]:
    from surefoot.training.arms import ARMS

    arms = [] if text == "none" else [part.strip() for part in text.split(",")]
    for arm in arms:
        if arm not in ARMS:
            raise ConfigError(f"--controls: arm {arm!r} does not exist; {nearest(arm, [*ARMS, 'none'])}")
    return arms


def _plan(request: _Request, json: bool) -> None:
    from surefoot.cli.output import emit
    from surefoot.cli.plan import check, estimate, print_plan

    config = request.config()
    unchecked = check(config)
    plan = estimate(config, request.folder(config))
    if json:
        emit({**plan, "unchecked": unchecked})
    else:
        print_plan(plan, unchecked)


def _execute(request: _Request, json: bool) -> RunResult:
    from surefoot.cli.output import complain
    from surefoot.cli.progress import make_progress
    from surefoot.training.run import resume_run, start_run

    config = None if request.resume else request.config()
    folder = request.existing() if config is None else request.folder(config)
    try:
        with make_progress(json=json) as progress:
            if config is None:
                return resume_run(folder, budget=request.settings, progress=progress)
            return start_run(config, folder, progress=progress)
    except KeyboardInterrupt as error:
        complain(f"interrupted; go on with: surefoot run {folder} --resume")
        raise typer.Exit(_INTERRUPTED) from error


def _report(path: Path) -> Path:
    from surefoot.report import write_report

    return write_report(path)


def _show(result: RunResult, report: Path | None, json: bool) -> None:
    from surefoot.cli.output import emit, say
    from surefoot.cli.results import Results, print_results

    results = Results.read(result.path)
    if json:
        shown = str(report) if report else None
        emit({**results.to_json(), "stopped": result.stopped, "report": shown})
        return
    print_results(results)
    if result.stopped:
        say(f"stopped: {result.stopped}", style="yellow")
    say(f"run: {result.path}")
    if report is not None:
        say(f"report: {report}")
