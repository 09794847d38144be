"""The manifest: what is written is what is read, equal manifests are equal bytes, anything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.publication.version_kit import CANARY
from trace_async.core.types import Adapter, Canary
from trace_async.errors import PolicyError
from trace_async.publication import manifest as m

_COUNT = st.integers(0, 2**40)
_DIGEST = st.binary(min_size=32, max_size=32).map(bytes.hex)
_LOGPROB = st.floats(allow_nan=False, allow_infinity=False, width=32)
_SAID = st.lists(st.tuples(st.integers(0, 2**31 - 1), _LOGPROB), min_size=2, max_size=5)


@st.composite
def manifests(draw: st.DrawFn) -> m.Manifest:
    version, epoch = draw(st.integers(0, 10**8)), draw(st.integers(0, 10**5))
    names = m.names_of(m.base_name(version=version, epoch=epoch))
    said = draw(st.lists(_SAID, min_size=1, max_size=3))
    return m.Manifest(
        version=version,
        epoch=epoch,
        weights=draw(entries(names.weights)),
        predictor=draw(entries(names.predictor)),
        tensors=tuple(
            draw(
                st.lists(st.builds(m.TensorEntry, name=st.text(), dtype=st.text(), shape=st.tuples(_COUNT)), max_size=3)
            )
        ),
        canary=Canary(
            prompts=tuple(np.array([token for token, _ in prompt], np.int32) for prompt in said),
            logprobs=tuple(np.array([logprob for _, logprob in prompt[1:]], np.float32) for prompt in said),
        ),
        adapter=draw(st.none() | st.builds(Adapter, rank=st.integers(1, 999), alpha=st.floats(0.1, 1e6))),
    )


def entries(name: str) -> st.SearchStrategy[m.FileEntry]:
    def entry(chunks: list[str], rest: int) -> m.FileEntry:
        num_bytes = max(0, len(chunks) - 1) * m.CHUNK_BYTES + (rest if chunks else 0)
        return m.FileEntry(name=name, num_bytes=num_bytes, chunk_digests=tuple(chunks))

    return st.builds(entry, st.lists(_DIGEST, max_size=3), st.integers(1, m.CHUNK_BYTES))


def plain(manifest: m.Manifest) -> tuple[object, ...]:
    """Comparable: arrays as lists."""
    canary = manifest.canary
    said = [[array.tolist() for array in arrays] for arrays in (canary.prompts, canary.logprobs)]
    return (*said, replace(manifest, canary=Canary(prompts=(), logprobs=())))


@given(manifests())
def test_what_is_written_is_what_is_read_to_the_last_bit_of_every_log_probability(manifest: m.Manifest) -> None:
    data = m.to_bytes(manifest)
    back = m.from_bytes(data)
    assert plain(back) == plain(manifest)
    assert m.to_bytes(back) == data
    assert {array.dtype for array in back.canary.prompts} <= {np.dtype(np.int32)}
    assert {array.dtype for array in back.canary.logprobs} <= {np.dtype(np.float32)}


EXAMPLE = m.Manifest(
    version=12,
    epoch=3,
    weights=m.FileEntry(name="e003_v000012.safetensors", num_bytes=1, chunk_digests=("b" * 64,)),
    predictor=m.FileEntry(name="e003_v000012.predictor.json", num_bytes=0, chunk_digests=()),
    tensors=(m.TensorEntry(name="w", dtype="F32", shape=(2, 3)),),
    canary=CANARY,
    adapter=Adapter(rank=4, alpha=8.0),
)

_LIES: tuple[Any, ...] = (None, True, -1, 1.5, "x", [], {}, "../../etc/passwd", 10**400, float("inf"))


def places(told: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value but the top."""
    inner = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    return [place for key, value in inner for place in [(*path, key), *places(value, (*path, key))]]


def test_a_lie_at_any_place_is_refused_or_harmless() -> None:
    honest = m.to_bytes(EXAMPLE)
    for place in places(json.loads(honest)):
        for lie in _LIES:
            told = json.loads(honest)
            inner = told
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = lie
            try:
                found = m.from_bytes(json.dumps(told).encode())
            except PolicyError:
                continue
            assert (found.weights.name, found.predictor.name) == m.names_of(
                m.base_name(version=found.version, epoch=found.epoch)
            )[:2]
            assert [len(p) - 1 for p in found.canary.prompts] == [len(said) for said in found.canary.logprobs]


@given(st.integers(0, 10**6), st.binary(max_size=4))
def test_bytes_that_are_cut_or_changed_are_refused_or_read_but_never_break(place: int, junk: bytes) -> None:
    honest = m.to_bytes(EXAMPLE)
    place %= len(honest)
    for data in (honest[:place], honest[:place] + junk + honest[place + 1 :], junk):
        try:
            m.from_bytes(data)
        except PolicyError:
            continue


def test_a_manifest_of_another_format_and_one_without_end_are_refused_by_name() -> None:
    told = {**json.loads(m.to_bytes(EXAMPLE)), "format": 2}
    with pytest.raises(PolicyError, match="has format 2, this program reads 1"):
        m.from_bytes(json.dumps(told).encode())
    with pytest.raises(PolicyError, match="is longer than"):
        m.from_bytes(b" " * (m.MAX_MANIFEST_BYTES + 1))
    with pytest.raises(PolicyError, match="no manifest"):
        m.from_bytes(b"[" * 100_000)


def test_names_are_read_back_and_strangers_have_no_version() -> None:
    assert m.names_of(m.base_name(version=12, epoch=3)) == (
        "e003_v000012.safetensors",
        "e003_v000012.predictor.json",
        "e003_v000012.manifest.json",
    )
    assert m.base_of("e003_v000012.manifest.json") == "e003_v000012"
    for stranger in ("e003_v000012.safetensors.part", "model.safetensors", "e3_v12.safetensors", ".publisher"):
        assert m.base_of(stranger) is None


def test_a_file_is_described_by_its_chunks(tmp_path: Path) -> None:
    data = bytes(range(256)) * (m.CHUNK_BYTES // 256) + b"rest"
    path = tmp_path / "file"
    path.write_bytes(data)
    entry = m.describe_file(path, name="told")
    assert (entry.name, entry.num_bytes) == ("told", len(data))
    assert m.file_digest(path) == m.bytes_digest(data)
    assert entry.chunk_digests == (m.bytes_digest(data[: m.CHUNK_BYTES]), m.bytes_digest(b"rest"))
