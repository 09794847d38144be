"""What every test shares: properties are drawn the same way on every machine and are not judged by a stopwatch."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
