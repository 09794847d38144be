"""The publisher's end: whole or absent, retired when nobody needs it, cleaned up after a death."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.publication.version_kit import CANARY, listing, memory_folder, publish, weights_bytes
from trace_async.core.types import Adapter
from trace_async.errors import ConfigError, PolicyError
from trace_async.publication.manifest import TensorEntry, bytes_digest, describe_file, from_bytes
from trace_async.publication.store import VersionStore


def names(*bases: str) -> list[str]:
    return sorted(base + kind for base in bases for kind in (".safetensors", ".predictor.json", ".manifest.json"))


def test_a_version_is_three_files_that_the_notice_vouches_for(tmp_path: Path) -> None:
    with VersionStore(tmp_path / "v", address="tcp://127.0.0.1:9") as store:
        notice, num_bytes = publish(store, 3, epoch=2, adapter=Adapter(rank=4, alpha=8.0))
    folder = tmp_path / "v"
    assert (notice.version, notice.epoch, notice.address) == (3, 2, "tcp://127.0.0.1:9")
    assert Path(notice.directory) == folder.resolve()
    assert listing(folder) == names("e002_v000003")
    assert num_bytes == sum((folder / name).stat().st_size for name in listing(folder))
    data = (folder / "e002_v000003.manifest.json").read_bytes()
    assert bytes_digest(data) == notice.manifest_digest
    manifest = from_bytes(data)
    for entry in (manifest.weights, manifest.predictor):
        assert entry == describe_file(folder / entry.name, name=entry.name)
    assert manifest.tensors == (TensorEntry(name="w", dtype="F32", shape=(8,)),)
    assert manifest.adapter == Adapter(rank=4, alpha=8.0)
    np.testing.assert_equal(manifest.canary.logprobs, CANARY.logprobs)
    assert json.loads((folder / "e002_v000003.predictor.json").read_text()) == {"of": 3}
    assert (folder / "e002_v000003.safetensors").read_bytes() == weights_bytes(3)


def test_a_writer_that_fails_half_way_leaves_no_version_and_the_next_one_is_fine(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with VersionStore(tmp_path) as store:
        with pytest.raises(OSError, match="disk full"):
            store.publish(version=1, epoch=1, write=fails, predictor={}, canary=CANARY, adapter=None)
        assert listing(tmp_path) == []
        publish(store, 1)
        assert listing(tmp_path) == names("e001_v000001")


def test_a_writer_that_writes_no_safetensors_file_is_told_so_and_nothing_is_announced(tmp_path: Path) -> None:
    with VersionStore(tmp_path) as store:
        with pytest.raises(PolicyError, match="no whole safetensors file"):
            store.publish(
                version=1, epoch=1, write=lambda path: path.touch(), predictor={}, canary=CANARY, adapter=None
            )
        assert store.num_versions == 0
    with VersionStore(tmp_path):
        assert listing(tmp_path) == []


def test_a_second_publisher_in_the_same_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with VersionStore(tmp_path), pytest.raises(ConfigError, match=r"in use by another run.*publication\.directory"):
        VersionStore(tmp_path)
    with VersionStore(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot publish versions in"):
        VersionStore(tmp_path / "file" / "versions")


def test_leftovers_of_a_dead_publisher_are_deleted_and_strangers_are_not(tmp_path: Path) -> None:
    with VersionStore(tmp_path) as store:
        publish(store, 1)
    leftovers = (
        *("e001_v000002.safetensors", "e001_v000002.predictor.json", "e001_v000002.manifest.json.part"),
        *("e001_v000003.manifest.json", "e001_v000004.safetensors.part"),
    )
    strangers = ("notes.txt", "model.safetensors", "notes.part", "e1_v2.safetensors")
    for name in (*leftovers, *strangers):
        (tmp_path / name).write_bytes(b"x")
    with VersionStore(tmp_path) as store:
        assert listing(tmp_path) == sorted([*names("e001_v000001"), *strangers])
        assert store.num_versions == 1


def test_versions_of_an_earlier_start_stay_until_everybody_has_a_new_one(tmp_path: Path) -> None:
    with VersionStore(tmp_path) as store:
        publish(store, 7)
    with VersionStore(tmp_path) as store:
        publish(store, 5, epoch=2)
        store.retire(keep=3, needed_since=-1)
        assert listing(tmp_path) == names("e001_v000007", "e002_v000005")
        store.retire(keep=3, needed_since=5)
        assert listing(tmp_path) == names("e002_v000005")


def test_a_version_that_was_published_before_under_that_name_is_replaced_as_a_whole(tmp_path: Path) -> None:
    with VersionStore(tmp_path) as store:
        publish(store, 5, floats=4)
    with VersionStore(tmp_path) as store:
        publish(store, 5)
        assert store.num_versions == 1
        assert (tmp_path / "e001_v000005.safetensors").read_bytes() == weights_bytes(5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 12)), min_size=1, max_size=10))
def test_what_is_kept_is_the_newest_and_what_is_needed_up_to_the_bound(rounds: list[tuple[int, int]]) -> None:
    expected: list[int] = []
    with memory_folder() as folder, VersionStore(folder) as store:
        for version, (keep, needed_since) in enumerate(rounds):
            publish(store, version)
            store.retire(keep=keep, needed_since=needed_since)
            expected = [v for v in [*expected, version][-keep:] if v >= needed_since or v == version]
            assert listing(folder) == names(*(f"e001_v{v:06d}" for v in expected))
            assert store.num_versions == len(expected)


def test_at_least_one_version_must_be_kept(tmp_path: Path) -> None:
    with VersionStore(tmp_path) as store, pytest.raises(ValueError, match="at least 1"):
        store.retire(keep=0, needed_since=0)
