"""The ``surefoot`` command: registers the commands and turns deliberate errors into exit codes.

Exit codes: 0 done, 1 failed claim or check, 2 bad input, 3 stopped by a budget, 130 interrupted.
``SUREFOOT_DEBUG=1`` shows tracebacks.
"""

from __future__ import annotations

import os
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from surefoot.cli.audit import audit
from surefoot.cli.check import checks
from surefoot.cli.compare import compare
from surefoot.cli.doctor import doctor
from surefoot.cli.evaluate import evaluate
from surefoot.cli.inspect import query, report
from surefoot.cli.models import models
from surefoot.cli.output import complain
from surefoot.cli.recipes import recipes
from surefoot.cli.run import run
from surefoot.core.errors import SurefootError

INTERRUPTED = 130
_TRAIN_MODULES = ("torch", "transformers", "tokenizers", "safetensors", "renderers", "httpx")


class _Guarded(TyperGroup):
    """Every command's deliberate errors end as one message on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SurefootError as error:
            _fail(error, str(error), error.exit_code)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _TRAIN_MODULES:
                raise
            _fail(error, f"this needs {error.name}: pip install 'surefoot[train]'", SurefootError.exit_code)
        except KeyboardInterrupt as error:
            _fail(error, "interrupted", INTERRUPTED)


def _fail(error: BaseException, message: str, code: int) -> None:
    if os.environ.get("SUREFOOT_DEBUG") == "1":
        traceback.print_exception(error)
    complain(message)
    raise typer.Exit(code) from error


app = typer.Typer(
    cls=_Guarded,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from surefoot import __version__

        typer.echo(f"surefoot {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Reinforcement learning for language-model agents, with results that can be believed."""


app.command("run")(run)
app.command("eval")(evaluate)
app.command("audit")(audit)
app.command("report")(report)
app.command("compare")(compare)
app.command("query")(query)
app.add_typer(checks, name="check")
app.add_typer(models, name="models")
app.command("recipes")(recipes)
app.command("doctor")(doctor)


def main() -> None:
    """Entry point of the console script."""
    app()
