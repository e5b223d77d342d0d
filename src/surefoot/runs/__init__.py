"""The files of a run: durable writes, the run folder, the trajectory store, queries. No torch."""

from __future__ import annotations

from surefoot.runs.directory import Manifest, RunDirectory
from surefoot.runs.query import query
from surefoot.runs.store import CreditRow, Journal, JournalEntry, TrajectoryStore

__all__ = ["CreditRow", "Journal", "JournalEntry", "Manifest", "RunDirectory", "TrajectoryStore", "query"]
