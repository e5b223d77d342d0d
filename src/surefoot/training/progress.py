"""How a run tells what it is doing; the command line draws it, tests ignore it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the run's phases in order."""

    def begin(self, phase: str, total: int) -> None:
        """A phase of ``total`` units starts."""
        ...

    def advance(self, amount: int = 1) -> None:
        """Units done in the current phase."""
        ...

    def say(self, text: str) -> None:
        """One line worth reading."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, phase: str, total: int) -> None:
        return

    def advance(self, amount: int = 1) -> None:
        return

    def say(self, text: str) -> None:
        return
