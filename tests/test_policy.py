"""Publication of a version as a file: whole or absent, verified or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trace_async.errors import PolicyError
from trace_async.policy import fetch, publish, retire


def writes(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def test_what_was_published_is_what_is_fetched(tmp_path: Path) -> None:
    predictor = {"kind": "beta", "prompts": [["a", 0.1, 2.0, 3.0]]}
    notice = publish(tmp_path, version=3, epoch=1, write=writes(b"weights"), predictor=predictor)
    assert fetch(notice) == (b"weights", predictor)
    assert (notice.version, notice.epoch) == (3, 1)


@pytest.mark.parametrize(("path", "digest"), [("weights", "digest"), ("predictor", "predictor_digest")])
def test_a_damaged_file_is_refused_with_both_digests(tmp_path: Path, path: str, digest: str) -> None:
    notice = publish(tmp_path, version=3, epoch=0, write=writes(b"old"), predictor={})
    Path(getattr(notice, path)).write_bytes(b'{"new": 1}')
    with pytest.raises(PolicyError, match=f"version 3.*{getattr(notice, digest)[:12]}"):
        fetch(notice)


@pytest.mark.parametrize("path", ["weights", "predictor"])
def test_a_missing_file_is_refused_with_the_cure(tmp_path: Path, path: str) -> None:
    notice = publish(tmp_path, version=1, epoch=0, write=writes(b"x"), predictor={})
    Path(getattr(notice, path)).unlink()
    with pytest.raises(PolicyError, match="run folder must be reachable"):
        fetch(notice)


def test_a_writer_that_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish(tmp_path, version=1, epoch=0, write=fails, predictor={})
    assert list(tmp_path.iterdir()) == []


def test_retiring_keeps_the_newest_across_epochs(tmp_path: Path) -> None:
    for epoch, version in ((0, 8), (0, 9), (0, 10), (1, 8), (1, 9)):
        publish(tmp_path, version=version, epoch=epoch, write=writes(b"x"), predictor={})
    retire(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "e001_v000008.predictor.json",
        "e001_v000008.safetensors",
        "e001_v000009.predictor.json",
        "e001_v000009.safetensors",
    ]
    with pytest.raises(ValueError, match="at least 1"):
        retire(tmp_path, keep=0)
