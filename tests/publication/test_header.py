"""The tensors of a safetensors file without torch: as the library has them, and no file that is not whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.publication.version_kit import weights_bytes
from trace_async.errors import PolicyError
from trace_async.publication.header import read_header
from trace_async.publication.manifest import TensorEntry


def test_names_shapes_and_dtypes_are_those_that_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "b": np.zeros((2, 3), np.float32),
        "a": np.zeros((), np.float16),
        "c": np.zeros((0, 4), np.int64),
        "d": np.zeros(5, np.bool_),
    }
    save_file(arrays, path, metadata={"aliases": "{}"})
    assert read_header(path) == (
        TensorEntry(name="a", dtype="F16", shape=()),
        TensorEntry(name="b", dtype="F32", shape=(2, 3)),
        TensorEntry(name="c", dtype="I64", shape=(0, 4)),
        TensorEntry(name="d", dtype="BOOL", shape=(5,)),
    )


def test_a_file_cut_off_after_any_byte_or_with_one_too_many_is_refused(tmp_path: Path) -> None:
    whole = weights_bytes(3)
    path = tmp_path / "w.safetensors"
    for data in [*(whole[:length] for length in range(len(whole))), whole + b"\0"]:
        path.write_bytes(data)
        with pytest.raises(PolicyError, match="no whole safetensors file"):
            read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"w": None},
        {"w": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "vw"},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_its_bytes_is_refused(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(PolicyError, match="no whole safetensors file"):
        read_header(path)


def test_a_header_that_claims_to_be_huge_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60))
    with pytest.raises(PolicyError, match="the header would be"):
        read_header(path)
    with pytest.raises(PolicyError, match="cannot read"):
        read_header(tmp_path / "nowhere")
