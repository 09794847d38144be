"""Files as streams of records, whatever holds them: JSON lines, a JSON list, Parquet, CSV or TSV; gzip or not.

A file is never in memory as a whole: the bound is one line, one list element, one batch of Parquet rows. Whatever is
wrong with a file is a ConfigError with its name and the line, element or row. Never: what the fields mean.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

from envs.multihop_qa.loading.json_list import MAX_ELEMENT_CHARS, ListError, read_list
from trace_async.errors import ConfigError

PARQUET_SUFFIXES = (".parquet", ".pq")
TABLE_SUFFIXES = {".csv": ",", ".tsv": "\t"}
MAX_LINE_BYTES = MAX_ELEMENT_CHARS

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_PARQUET_BATCH = 256  # rows; a few MB where questions bring their paragraphs


class Row(NamedTuple):
    """One record of a file."""

    number: int  # from 1
    place: str  # file and line, element or row, for messages
    fields: Mapping[str, object]


def read_rows(path: Path) -> Iterator[Row]:
    """The records in order; the suffix (before .gz) or else the first character tells what holds them.

    Raises ConfigError for a file that is absent, damaged, or holds something that is not a record.
    """
    try:
        yield from _read(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); check its permissions, or fetch it again") from error


def kind_suffix(path: Path) -> str:
    """The suffix before .gz, in lower case: ".jsonl" of questions.jsonl.gz."""
    return path.with_suffix("").suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _read(path: Path) -> Iterator[Row]:
    suffix = kind_suffix(path)
    if suffix in PARQUET_SUFFIXES:
        yield from _parquet_rows(path)
        return
    with _opened(path) as stream:
        if suffix in TABLE_SUFFIXES:
            yield from _table_rows(path, stream, TABLE_SUFFIXES[suffix])
        elif stream.peek(io.DEFAULT_BUFFER_SIZE).removeprefix(_BOM).lstrip()[:1] == b"[":
            yield from _list_rows(path, stream)
        else:
            yield from _line_rows(path, stream)


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, unpacked when they start like gzip."""
    with path.open("rb") as raw:
        if raw.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] != _GZIP_MAGIC:
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as unpacked:
            stream: io.BufferedReader = io.BufferedReader(cast(io.RawIOBase, unpacked))
            yield stream


def _line_rows(path: Path, stream: io.BufferedReader) -> Iterator[Row]:
    number = line_number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        line_number += 1
        place = f"{path}, line {line_number}"
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{place}: longer than {MAX_LINE_BYTES:,} bytes; write one record a line")
        try:
            text = line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
            if not text:
                continue
            value = json.loads(text)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: not JSON ({error}); write one JSON object a line, or one JSON list") from None
        number += 1
        yield Row(number, place, _object(value, place))


def _list_rows(path: Path, stream: io.BufferedReader) -> Iterator[Row]:
    number = 0
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        try:
            for number, line, value in read_list(text):
                place = f"{path}, element {number} (line {line})"
                yield Row(number, place, _object(value, place))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 ({error.reason}) after element {number}; convert the file") from None
        except ListError as error:
            raise ConfigError(f"{path}, {error}; mend the list, or write one JSON object a line") from None


def _table_rows(path: Path, stream: io.BufferedReader, delimiter: str) -> Iterator[Row]:
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        number = 0
        try:
            for cells in reader:
                place = f"{path}, line {reader.line_num}"
                if not cells:
                    continue
                if header is None:
                    header = _header(cells, place)
                    continue
                if len(cells) != len(header):
                    raise ConfigError(
                        f"{place}: {len(cells)} cells under {len(header)} columns; quote cells with commas"
                    )
                number += 1
                yield Row(number, place, dict(zip(header, cells, strict=True)))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 ({error.reason}) after row {number}; convert the file") from None
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num}: not CSV ({error}); mend the quoting") from None


def _header(cells: list[str], place: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if len(set(names)) < len(names):
        raise ConfigError(f"{place}: the header {names} names a column twice; rename one")
    return names


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow; pip install 'trace-async[parquet]'") from None
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(number, f"{path}, row {number}", fields)
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path}: damaged Parquet after row {number} ({error}); fetch it again") from error


def _object(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: a record must be a JSON object, found {type(value).__name__}; mend it")
    return value
