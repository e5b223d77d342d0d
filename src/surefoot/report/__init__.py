"""The static report of a run: one self-contained HTML file. Knows what a run wrote, not how it ran."""

from __future__ import annotations

from surefoot.report.page import write_report

__all__ = ["write_report"]
