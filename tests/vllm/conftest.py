"""These tests run real vLLM on the CPU: `make test-vllm`. Elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Before torch is imported, for this process too: vLLM takes every CPU, and beside it two threads of torch, which wait
# for each other, take seconds for what one does in milliseconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What vLLM and its libraries warn of while they are imported and started is not ours; our own warnings stay errors.
_NOT_OURS = (
    *(f"ignore::{kind}" for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")),
    *("ignore::UserWarning", "ignore::SyntaxWarning", "ignore::ImportWarning", "ignore::ResourceWarning"),
    "ignore::RuntimeWarning:vllm.*",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips everything here without vLLM, and gives what starts engines the time for it."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if missing:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed here; run: make test-vllm"))
            item.add_marker(pytest.mark.timeout(600))
            for rule in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(rule))
