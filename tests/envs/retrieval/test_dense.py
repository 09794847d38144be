from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.retrieval import dense
from envs.retrieval.dense import DenseRetriever, TransformersEncoder
from envs.retrieval.protocol import Hit, Passage
from envs.retrieval.registry import RetrieverOptions, make_retriever
from tests.envs.retrieval.kit import WORDS, corpora, texts
from trace_async.errors import ConfigError

pytestmark = pytest.mark.timeout(300)  # importing transformers' models takes minutes where many share a core


class HashingEncoder:
    """Adds a random direction per word, drawn from its digest."""

    encoder_id = "hashing"

    def __init__(self) -> None:
        self.encoded: list[list[str]] = []

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.encoded.append(list(texts))
        return np.stack([self._encode(text) for text in texts])

    def encode_query(self, text: str) -> NDArray[np.float32]:
        return self._encode(text)

    def _encode(self, text: str) -> NDArray[np.float32]:
        vector = np.zeros(16)
        for word in text.split():
            seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
            vector += np.random.default_rng(seed).normal(size=16)
        length = np.linalg.norm(vector)
        return (vector / length if length else vector).astype(np.float32)


PAGES = [Passage(f"{number}", WORDS[number], f"{WORDS[number]} and {WORDS[(number + 1) % 7]}") for number in range(7)]


def names(hits: Sequence[Hit]) -> list[str]:
    return [found.passage.doc_id for found in hits]


@settings(max_examples=40)
@given(corpora(), texts.filter(bool), st.integers(1, 9))
def test_it_finds_the_nearest_best_first_then_by_document_id(corpus: list[Passage], query: str, k: int) -> None:
    twins = [*corpus, *(Passage(f"c{passage.doc_id}", passage.title, passage.text) for passage in corpus)]
    encoder = HashingEncoder()
    (hits,) = DenseRetriever(twins, encoder).search_now([query], k)
    scores = {
        passage.doc_id: float(
            encoder.encode_passages([f"{passage.title}\n{passage.text}"])[0] @ encoder.encode_query(query)
        )
        for passage in twins
    }
    assert [found.score for found in hits] == pytest.approx(sorted(scores.values(), reverse=True)[:k], abs=1e-5)
    assert [scores[name] for name in names(hits)] == pytest.approx([found.score for found in hits], abs=1e-5)
    assert hits == sorted(hits, key=lambda found: (-found.score, found.passage.doc_id))


def test_a_query_without_words_finds_nothing() -> None:
    assert DenseRetriever(PAGES, HashingEncoder()).search_now(["", "?!", "amber"], 2)[:2] == [[], []]


def test_an_answer_does_not_depend_on_its_batch() -> None:
    retriever = DenseRetriever(PAGES, HashingEncoder())
    queries = ["amber dune", "birch", "ember ember"]
    batch = retriever.search_now(queries, 3)
    assert [retriever.search_now([query], 3)[0] for query in queries] == batch


def test_the_index_is_known_by_corpus_and_encoder() -> None:
    other = HashingEncoder()
    other.encoder_id = "other"
    ids = {
        DenseRetriever(PAGES, HashingEncoder()).index_id,
        DenseRetriever(PAGES[::-1], HashingEncoder()).index_id,
        DenseRetriever(PAGES[1:], HashingEncoder()).index_id,
        DenseRetriever(PAGES, other).index_id,
    }
    assert len(ids) == 3


def test_vectors_in_a_file_are_encoded_once(tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    first, second, third = HashingEncoder(), HashingEncoder(), HashingEncoder()
    expected = DenseRetriever(PAGES, first, path=path).search_now(["amber dune"], 3)
    assert DenseRetriever(PAGES[::-1], second, path=path).search_now(["amber dune"], 3) == expected
    assert [len(first.encoded), len(second.encoded)] == [1, 0]
    DenseRetriever(PAGES[:3], third, path=path)  # another corpus: written anew
    assert len(third.encoded) == 1
    assert DenseRetriever(PAGES[:3], second, path=path).size == 3
    assert second.encoded == []
    assert [file.name for file in tmp_path.iterdir()] == ["vectors"]


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(ConfigError, match="not a file of vectors"):
        DenseRetriever(PAGES, HashingEncoder(), path=tmp_path / "thesis")
    with pytest.raises(ConfigError, match="cannot be written"):
        DenseRetriever(PAGES, HashingEncoder(), path=tmp_path / "no folder" / "vectors")


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="the corpus is empty"):
        DenseRetriever([], HashingEncoder())


def test_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="k >= 1"):
        DenseRetriever(PAGES, HashingEncoder()).search_now(["amber"], 0)


def test_faiss_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    queries = ["amber dune", "birch", "ember ember"]
    expected = DenseRetriever(PAGES, HashingEncoder()).search_now(queries, 4)
    monkeypatch.setattr(dense, "FAISS_FROM", 1)
    found = DenseRetriever(PAGES, HashingEncoder()).search_now(queries, 4)
    assert [names(hits) for hits in found] == [names(hits) for hits in expected]
    assert len(DenseRetriever(PAGES, HashingEncoder()).search_now(["amber"], 99)[0]) == len(PAGES)


def test_without_faiss_a_big_corpus_is_searched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = DenseRetriever(PAGES, HashingEncoder()).search_now(["amber"], 3)
    monkeypatch.setattr(dense, "FAISS_FROM", 1)
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert DenseRetriever(PAGES, HashingEncoder()).search_now(["amber"], 3) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights, as e5 is saved."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("encoder")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(path)
    return path


def test_vectors_are_e5s(folder: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    encoder = TransformersEncoder(folder)
    found = encoder.encode_passages(["amber", "birch cedar dune ember"])
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    for row, text in zip(found, ["passage: amber", "passage: birch cedar dune ember"], strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        mean = states.mean(0).numpy()
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), atol=1e-5)  # padding changes nothing
    with torch.inference_mode():
        mean = model(**tokenizer("query: amber", return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(encoder.encode_query("amber"), mean / np.linalg.norm(mean), atol=1e-5)


def test_long_texts_are_cut(folder: Path) -> None:
    encoder = TransformersEncoder(folder, max_query_tokens=6, max_passage_tokens=8)
    whole = TransformersEncoder(folder).encode_query("amber birch cedar")
    assert np.abs(whole - encoder.encode_query("amber birch cedar")).max() > 1e-4
    np.testing.assert_array_equal(encoder.encode_query("amber birch cedar"), encoder.encode_query("amber birch dune"))
    vectors = encoder.encode_passages(["amber birch cedar dune ember", "amber birch cedar dune fjord"])
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_the_encoder_is_known_by_its_weights_and_settings(folder: Path, tmp_path: Path) -> None:
    one = TransformersEncoder(folder).encoder_id
    assert one == TransformersEncoder(folder).encoder_id
    assert one != TransformersEncoder(folder, query_prefix="").encoder_id
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert one == TransformersEncoder(tmp_path).encoder_id
    (tmp_path / "more.txt").write_text("another file")
    assert one != TransformersEncoder(tmp_path).encoder_id


def test_a_page_is_nearest_to_its_own_words(folder: Path) -> None:
    retriever = make_retriever(RetrieverOptions(kind="dense", encoder=str(folder), cache_entries=0), lambda: PAGES)
    assert isinstance(retriever, DenseRetriever)
    (hits,) = retriever.search_now(["amber amber and birch"], len(PAGES))
    assert len(hits) == len(PAGES)
    assert [found.score for found in hits] == sorted((found.score for found in hits), reverse=True)


def test_a_folder_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        TransformersEncoder(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="not an encoder that transformers can load"):
        TransformersEncoder(tmp_path)
