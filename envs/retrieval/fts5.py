"""BM25 by SQLite's FTS5: an index that needs no package, in memory or in a file.

Porter stems, title weight 2, documents that hold any of `query_words` (k1 = 1.2 and b = 0.75 are fixed in SQLite).
Invariants: queries are data, never FTS5 syntax; ties are broken by document id; a connection is used by one thread at
a time; a file is complete or it is not there.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from envs.retrieval.local import CorpusDigest, LocalRetriever, check_k, query_words, without_surrogates
from envs.retrieval.protocol import Hit, Passage
from trace_async.errors import ConfigError, EnvironmentFailure

TITLE_WEIGHT = 2.0
MAX_QUERY_WORDS = 256
"""Words of a query that are searched; SQLite's time grows with the square of their number."""

_INLINE_PASSAGES = 5_000  # about 2 ms
_FORMAT = "porter-1"  # changes whenever the same corpus would give other answers, or old files must not be read
_TABLES = """
CREATE TABLE meta(format TEXT, digest TEXT, size INTEGER);
CREATE TABLE documents(doc_id TEXT, title TEXT, text TEXT);
CREATE TEMP TABLE unsorted(doc_id TEXT, title TEXT, text TEXT);
CREATE VIRTUAL TABLE words USING fts5(title, text, content='', tokenize='porter unicode61');
"""
_SORT_AND_INDEX = (
    "INSERT INTO documents SELECT doc_id, title, text FROM unsorted ORDER BY doc_id",  # rows are in order of their ids
    "INSERT INTO words(rowid, title, text) SELECT rowid, title, text FROM documents",
    "INSERT INTO words(words) VALUES ('optimize')",
    "DROP TABLE unsorted",
)
_QUERY = f"""
SELECT doc_id, title, text, score FROM (
    SELECT rowid AS number, -bm25(words, {TITLE_WEIGHT}, 1.0) AS score FROM words WHERE words MATCH ?
    ORDER BY score DESC, number LIMIT ?
) JOIN documents ON documents.rowid = number ORDER BY score DESC, number
"""


class Fts5Retriever(LocalRetriever):
    """The index of some passages; `path` keeps it in a file, replacing what is there.

    Raises ConfigError for an empty corpus, a document id seen twice, a file that cannot be written, or an SQLite
    without FTS5.
    """

    def __init__(self, passages: Iterable[Passage], *, path: str | Path | None = None) -> None:
        if path is None:
            connection = sqlite3.connect(":memory:", check_same_thread=False)
            try:
                digest, size = _fill(connection, passages)
            except BaseException:
                connection.close()
                raise
            self._start(_Connections(connection, None), digest, size)
        else:
            digest, size = _write_file(Path(path), passages)
            self._start(_Connections(_connect(Path(path)), Path(path)), digest, size)

    @classmethod
    def open(cls, path: str | Path) -> Fts5Retriever:
        """The index that a file holds. ConfigError when there is none or it is something else."""
        digest, size = read_meta(Path(path))
        retriever = cls.__new__(cls)
        retriever._start(_Connections(_connect(Path(path)), Path(path)), digest, size)
        return retriever

    def _start(self, connections: _Connections, digest: str, size: int) -> None:
        self._connections = connections
        super().__init__(index_id=f"fts5:{_FORMAT}:{digest}", size=size, inline_limit=_INLINE_PASSAGES)

    def search_now(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """ValueError when k < 1; EnvironmentFailure when the file cannot be read or the retriever was closed."""
        check_k(k)
        with self._connections.one() as connection:
            return [_search(connection, query, k) for query in queries]

    async def close(self) -> None:
        self._connections.close()


def match_expression(query: str) -> str:
    """The FTS5 expression "any of these words", each quoted; "" when there is none."""
    return " OR ".join(f'"{word}"' for word in query_words(query)[:MAX_QUERY_WORDS])


def read_meta(path: Path) -> tuple[str, int]:
    """Corpus digest and number of passages of an index file. ConfigError when it is none."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such index file")
    try:
        with closing(_connect(path)) as connection:
            written, digest, size = connection.execute("SELECT format, digest, size FROM meta").fetchone()
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not an index of passages ({error}); delete it or name another file") from error
    if written != _FORMAT:
        raise ConfigError(f"{path}: index format {written!r}, this release reads {_FORMAT!r}; delete it")
    return str(digest), int(size)


def _search(connection: sqlite3.Connection, query: str, k: int) -> list[Hit]:
    expression = match_expression(query)
    if not expression:
        return []
    rows = connection.execute(_QUERY, (expression, k))
    return [Hit(Passage(doc_id, title, text), score) for doc_id, title, text, score in rows]


class _Connections:
    """Connections to one index: a single one in memory, in a file as many as threads search at the same time."""

    def __init__(self, first: sqlite3.Connection, path: Path | None) -> None:
        self._path = path
        self._idle = [first]
        self._lock = threading.Lock()  # guards `_idle` and `_closed`
        self._turn = threading.Lock()  # held by the search that uses the connection in memory
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile; errors of SQLite become EnvironmentFailure."""
        if self._path is None:
            with self._turn, self._borrowed() as connection:
                yield connection
        else:
            with self._borrowed() as connection:
                yield connection

    @contextmanager
    def _borrowed(self) -> Iterator[sqlite3.Connection]:
        connection: sqlite3.Connection | None = None
        try:
            connection = self._take()
            yield connection
        except sqlite3.Error as error:
            raise EnvironmentFailure(f"index {self._path or 'in memory'}: {error}") from error
        finally:
            if connection is not None:
                self._put_back(connection)

    def _take(self) -> sqlite3.Connection:
        with self._lock:
            if self._closed:
                raise EnvironmentFailure(f"index {self._path or 'in memory'} was closed")
            if self._idle:
                return self._idle.pop()
        assert self._path is not None
        return _connect(self._path)

    def _put_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"  # nobody writes to a complete index
    return sqlite3.connect(uri, uri=True, check_same_thread=False)


def _write_file(path: Path, passages: Iterable[Passage]) -> tuple[str, int]:
    """Write an index beside `path` and move it there; returns corpus digest and number of passages."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        draft.unlink(missing_ok=True)
        with closing(sqlite3.connect(draft)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            result = _fill(connection, passages)
        os.replace(draft, path)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{path}: the index cannot be written ({error}); name a file in a writable folder") from error
    finally:
        if path.parent.is_dir():
            draft.unlink(missing_ok=True)
    return result


def _fill(connection: sqlite3.Connection, passages: Iterable[Passage]) -> tuple[str, int]:
    """Make the tables and insert everything; returns corpus digest and number of passages."""
    digest = CorpusDigest()
    try:
        connection.executescript(_TABLES)
    except sqlite3.OperationalError as error:
        if "fts5" not in str(error):
            raise
        raise ConfigError(f"this Python's SQLite has no FTS5 ({error}); use another retriever kind") from error
    with connection:
        rows = (tuple(map(without_surrogates, passage)) for passage in digest.watch(passages))
        connection.executemany("INSERT INTO unsorted VALUES (?, ?, ?)", rows)
        if not len(digest):
            raise ConfigError("the corpus is empty: there is nothing to search")
        for statement in _SORT_AND_INDEX:
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES (?, ?, ?)", (_FORMAT, digest.hexdigest(), len(digest)))
    return digest.hexdigest(), len(digest)
