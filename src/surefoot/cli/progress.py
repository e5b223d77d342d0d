"""Draws a run's progress: a bar with rate and ETA on a terminal, plain lines elsewhere.

Implements ``surefoot.training.progress.Progress``; must not know what a phase does.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from surefoot.cli.output import console, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TaskID

_EVERY_SECONDS = 30.0
# An update pauses the episodes, so the rate has to be taken over several steps.
_RATE_SECONDS = 600.0


class ShownProgress(Protocol):
    """A ``Progress`` that is shown while its ``with`` block runs."""

    def begin(self, phase: str, total: int) -> None:
        """A phase of ``total`` units starts."""
        ...

    def advance(self, amount: int = 1) -> None:
        """Units done in the current phase."""
        ...

    def say(self, text: str) -> None:
        """One line worth reading."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_progress(*, json: bool) -> ShownProgress:
    """Bars where the stream is a terminal, lines otherwise; on stderr when stdout is for JSON."""
    stream = console(error=json)
    return Bars(stream) if stream.is_terminal else Lines(stream)


class Bars:
    """The current phase as a bar, with finished lines above it."""

    def __init__(self, stream: Console) -> None:
        from rich.progress import Progress

        self._bars = Progress(
            *_columns(), console=stream, transient=True, speed_estimate_period=_RATE_SECONDS
        )
        self._task: TaskID | None = None

    def begin(self, phase: str, total: int) -> None:
        """Replace the bar."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(phase, total=total)

    def advance(self, amount: int = 1) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def say(self, text: str) -> None:
        """Print above the bar."""
        self._bars.console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def _columns() -> list[ProgressColumn]:
    from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(TextColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "")

    return [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        Rate(""),
        TimeRemainingColumn(),
    ]


class Lines:
    """Plain lines for logs: each phase as it begins, how far it is every half minute."""

    def __init__(self, stream: Console) -> None:
        self._stream = stream
        self._phase, self._total, self._done = "", 0, 0
        self._began = self._shown = time.monotonic()

    def begin(self, phase: str, total: int) -> None:
        """Name the phase."""
        self._phase, self._total, self._done = phase, total, 0
        self._began = self._shown = time.monotonic()
        self.say(f"{phase}: {total} episodes")

    def advance(self, amount: int = 1) -> None:
        """Count, and now and then say how far it is."""
        self._done += amount
        now = time.monotonic()
        if now - self._shown < _EVERY_SECONDS:
            return
        self._shown = now
        rate = self._done / (now - self._began)
        left = duration(max(self._total - self._done, 0) / rate)
        self.say(f"{self._phase}: {self._done}/{self._total}, {rate:.2g}/s, about {left} left")

    def say(self, text: str) -> None:
        """Print a line."""
        self._stream.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return
