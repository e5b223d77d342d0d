"""Settings for all tests: property tests draw the same examples on every run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")
