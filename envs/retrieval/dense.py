"""Search by vectors: an encoder, the inner product, the best rows.

The encoder is a Protocol; `TransformersEncoder` is e5's way (prefixes, mean of the last layer, unit length). Exact
search by NumPy, by faiss's flat index from FAISS_FROM passages on where faiss is installed. Queries are encoded and
searched one by one, because in a batch the same query gets other roundings. Vectors can be kept in a file, which is
complete or not there. Never: downloads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.retrieval.local import CorpusDigest, LocalRetriever, best_rows, check_k, query_words
from envs.retrieval.protocol import Hit, Passage
from trace_async.errors import ConfigError

FAISS_FROM = 500_000
BATCH = 64  # passages encoded at once


class Encoder(Protocol):
    """Texts to vectors; rows are compared by their inner product, so they should have unit length."""

    @property
    def encoder_id(self) -> str:
        """Everything that the vectors depend on, as one name."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[len(texts), H]"""
        ...

    def encode_query(self, text: str) -> NDArray[np.float32]:
        """[H]"""
        ...


class DenseRetriever(LocalRetriever):
    """Passages by the vectors of "title, newline, text". A query without words finds nothing, any other finds `k`.

    Raises ConfigError for an empty corpus, a document id seen twice, or a file of vectors that cannot be used.
    """

    def __init__(self, passages: Iterable[Passage], encoder: Encoder, *, path: Path | None = None) -> None:
        """`path`: file of the vectors, read when it belongs to this corpus and encoder, else written."""
        digest = CorpusDigest()
        self._passages = sorted(digest.watch(passages))  # by document id, as ties are broken
        if not self._passages:
            raise ConfigError("the corpus is empty: there is nothing to search")
        self._encoder = encoder
        self._lock = Lock()  # encoders need not be safe in several threads
        index_id = f"dense:{encoder.encoder_id}:{digest.hexdigest()}"
        vectors_DH = _read_vectors(path, index_id) if path is not None and path.exists() else None
        if vectors_DH is None:
            vectors_DH = _encode_all(self._passages, encoder)
            if path is not None:
                _write_vectors(path, index_id, vectors_DH)
        self._rows = _make_rows(vectors_DH)
        super().__init__(index_id=index_id, size=len(self._passages), inline_limit=0)

    def search_now(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        return [self._search(query, k) if query_words(query) else [] for query in queries]

    def _search(self, query: str, k: int) -> list[Hit]:
        with self._lock:
            query_H = self._encoder.encode_query(query)
        return [Hit(self._passages[row], score) for row, score in self._rows.best(query_H, k)]


class TransformersEncoder:
    """A BERT-like encoder from a local folder, used as e5 is: mean over the tokens of the last layer, unit length.

    Raises ConfigError when the folder cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        *,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        max_query_tokens: int = 256,
        max_passage_tokens: int = 256,
        device: str = "cpu",
    ) -> None:
        """Longer texts are cut."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        if not path.is_dir():
            raise ConfigError(f"{path}: there is no such folder; an encoder is a folder of transformers")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            model: Any = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path}: not an encoder that transformers can load ({error})") from error
        self._model = model.eval().to(device)
        self._device = device
        self._query = (query_prefix, max_query_tokens)
        self._passage = (passage_prefix, max_passage_tokens)
        settings = f"{self._query} {self._passage} {_digest_folder(path)}"
        self._encoder_id = "mean-" + hashlib.sha256(settings.encode()).hexdigest()[:32]

    @property
    def encoder_id(self) -> str:
        return self._encoder_id

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._encode(texts, *self._passage)

    def encode_query(self, text: str) -> NDArray[np.float32]:
        vector_H: NDArray[np.float32] = self._encode([text], *self._query)[0]
        return vector_H

    def _encode(self, texts: Sequence[str], prefix: str, max_tokens: int) -> NDArray[np.float32]:
        import torch

        batch = self._tokenizer(
            [prefix + text for text in texts],
            padding=True,
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        ).to(self._device)
        with torch.inference_mode():
            states_BTH = self._model(**batch).last_hidden_state
            mask_BT1 = batch["attention_mask"].unsqueeze(-1).to(states_BTH.dtype)
            mean_BH = (states_BTH * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1.0)
            vectors_BH = torch.nn.functional.normalize(mean_BH, dim=-1)
        result: NDArray[np.float32] = vectors_BH.cpu().numpy()
        return result


class _Rows(Protocol):
    """Vectors that can be searched."""

    def best(self, query_H: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
        """The `k` rows with the highest inner products, best first, of equal ones the lower row first."""
        ...


class _NumpyRows:
    def __init__(self, vectors_DH: NDArray[np.float32]) -> None:
        self._vectors_DH = vectors_DH

    def best(self, query_H: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
        scores_D = self._vectors_DH @ query_H
        return [(row, float(scores_D[row])) for row in best_rows(scores_D, k)]


class _FaissRows:
    """Which rows it finds among those equal at the k-th place is faiss's choice."""

    def __init__(self, vectors_DH: NDArray[np.float32], faiss: Any) -> None:
        self._index = faiss.IndexFlatIP(vectors_DH.shape[1])
        self._index.add(np.ascontiguousarray(vectors_DH))

    def best(self, query_H: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
        scores_1K, rows_1K = self._index.search(np.ascontiguousarray(query_H[None]), min(k, self._index.ntotal))
        found = zip(rows_1K[0].tolist(), scores_1K[0].tolist(), strict=True)
        return sorted(found, key=lambda one: (-one[1], one[0]))


def _make_rows(vectors_DH: NDArray[np.float32]) -> _Rows:
    if len(vectors_DH) >= FAISS_FROM:
        try:
            import faiss
        except ImportError:
            return _NumpyRows(vectors_DH)
        return _FaissRows(vectors_DH, faiss)
    return _NumpyRows(vectors_DH)


def _encode_all(passages: Sequence[Passage], encoder: Encoder) -> NDArray[np.float32]:
    return np.concatenate([encoder.encode_passages(texts) for texts in _batches(passages)]).astype(np.float32)


def _batches(passages: Sequence[Passage]) -> Iterator[list[str]]:
    texts = (f"{title}\n{text}" for _, title, text in passages)
    while batch := list(islice(texts, BATCH)):
        yield batch


def _read_vectors(path: Path, index_id: str) -> NDArray[np.float32] | None:
    """The vectors of this index, or None when the file is another's. ConfigError when it is no file of vectors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("index_id") != index_id:
                return None
            vectors_DH: NDArray[np.float32] = file.get_tensor("vectors")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a file of vectors ({error}); delete it or name another file") from error
    return vectors_DH


def _write_vectors(path: Path, index_id: str, vectors_DH: NDArray[np.float32]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        save_file({"vectors": vectors_DH}, draft, metadata={"index_id": index_id})
        os.replace(draft, path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: vectors cannot be written ({error}); name a file in a writable folder") from error


def _digest_folder(path: Path) -> str:
    """Of the names and contents of the folder's files."""
    whole = hashlib.sha256()
    for file in sorted(found for found in path.iterdir() if found.is_file()):
        with file.open("rb") as stream:
            whole.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
