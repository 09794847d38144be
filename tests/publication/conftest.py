"""What the tests of publication share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.publication.version_kit import memory_folder


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder that is deleted afterwards, in memory where the machine has such: disks are slow."""
    with memory_folder() as folder:
        yield folder
