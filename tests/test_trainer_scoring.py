"""Packed trees and the chunked head against path rows and all logits: same numbers, same gradients, less held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.core.test_tree_packing import LONGEST_PATH
from tests.trainer_kit import COMMON, items
from trace_async.core.packing import PackItem, RowBatch, first_tokens, pack
from trace_async.core.rows import plan_rows, scored_turns
from trace_async.core.tree_packing import TreeBatch, pack_trees
from trace_async.core.types import Adapter
from trace_async.trainer_head import ChunkedHead, Wanted
from trace_async.trainer_layers import recompute_activations
from trace_async.trainer_lora import add_pairs
from trace_async.trainer_scoring import Scorer

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, initializer_range=0.2)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{key: value for key, value in COMMON.items() if key != "head_dim"}, initializer_range=0.2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=True, initializer_range=0.2)),
}
VARIANTS = ("plain", "lora", "checkpointing")
SEEDS = st.integers(0, 2**32)
TEMPERATURE = 0.8


def in_evaluation(model: Any) -> Any:
    """Without dropout."""
    return model.train(mode=False)


@cache
def scorer_of(family: str, variant: str) -> tuple[PreTrainedModel, Scorer]:
    torch.manual_seed(0)
    model = in_evaluation(FAMILIES[family]())
    if variant == "lora":
        add_pairs(model, adapter=Adapter(rank=4, alpha=8.0))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.2)
    scorer = Scorer(model, temperature=TEMPERATURE)
    assert scorer.probe_trees(64)
    assert scorer.chunks_head
    if variant == "checkpointing":
        recompute_activations(model)
    return model, scorer


def learn(model: Any, scorer: Scorer, batches: list[RowBatch], coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities by place in the table, NaN where nothing is scored, and the gradient of a weighted sum."""
    model.zero_grad()
    found = torch.full_like(coefficients, torch.nan)
    for batch in batches:
        places = torch.from_numpy(batch.token_index[batch.scored])
        logprobs = scorer.logprobs(batch)
        assert logprobs.dtype == torch.float32
        assert found[places].isnan().all()  # once
        found[places] = logprobs.detach()
        (coefficients[places] * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    return found, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def packed(layout: Callable[..., list[RowBatch]], batch: list[PackItem], bound: int) -> list[RowBatch]:
    return layout(batch, first_tokens=first_tokens(batch), micro_batch_tokens=bound)


def weights_for(batch: list[PackItem], seed: int) -> Tensor:
    count = sum(item.group.num_sampled_tokens for item in batch)
    return torch.from_numpy(np.random.default_rng(seed).normal(size=count).astype(np.float32))


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert float((found[1] - expected[1]).abs().max()) <= 1e-5 * max(1.0, float(expected[1].abs().max()))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, bound=st.integers(LONGEST_PATH, 300))
def test_packed_trees_give_the_numbers_and_gradients_of_path_rows(
    family: str, variant: str, seed: int, bound: int
) -> None:
    model, scorer = scorer_of(family, variant)
    batch = items(seed, count=3)
    weights = weights_for(batch, seed)
    expected = learn(model, scorer, packed(pack, batch, 4096), weights)
    assert_same(learn(model, scorer, packed(pack_trees, batch, bound), weights), expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_tree_cut_at_any_bound_gives_the_gradient_of_the_whole_tree(seed: int) -> None:
    model, scorer = scorer_of("llama", "plain")
    whole = max(items(seed, count=6), key=lambda item: len(plan_rows(item, 0)))
    weights = weights_for([whole], seed)
    (uncut,) = packed(pack_trees, [whole], 4096)
    expected = learn(model, scorer, packed(pack, [whole], 4096), weights)
    shortest = max(row.length for row in plan_rows(whole, 0))
    pieces = set()
    for bound in range(shortest, uncut.token_ids.size + 1):
        batches = packed(pack_trees, [whole], bound)
        pieces.add(len(batches))
        assert_same(learn(model, scorer, batches, weights), expected)
    assert max(pieces) >= 2
    assert min(pieces) == 1
    sampled = sum(int(whole.group.action_lengths[turn]) for turn in np.flatnonzero(scored_turns(whole)))
    assert int((~expected[0].isnan()).sum()) == sampled


def test_long_chains_are_taken_in_parts_that_change_nothing() -> None:
    config = {**COMMON, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = in_evaluation(LlamaForCausalLM(LlamaConfig(**config, initializer_range=0.2)))
    scorer = Scorer(model, temperature=1.0)
    assert scorer.probe_trees(1024)
    stem, branch, other = 300, 140, 270
    total = stem + branch + other
    end = np.full(total, total)
    end[stem : stem + branch] = stem + branch
    predecessor = np.maximum(np.arange(total) - 1, 0)
    predecessor[stem + branch] = stem - 1
    positions = np.r_[: stem + branch, stem : stem + other]
    ids = np.random.default_rng(0).integers(0, 220, total)
    index = np.arange(total) - 1
    trees = TreeBatch(
        token_ids=ids[None],
        attention_mask=np.ones((1, total), np.bool_),
        token_index=index[None],
        num_trees=1,
        whole=True,
        positions=positions[None],
        predecessor=predecessor[None],
        subtree_end=end[None],
    )
    rows = []
    for columns, first in ((np.arange(stem + branch), 1), (np.r_[:stem, stem + branch : total], stem)):
        own = np.where(np.arange(columns.size) < first, -1, index[columns])
        mask = np.ones((1, columns.size), np.bool_)
        rows.append(
            RowBatch(token_ids=ids[columns][None], attention_mask=mask, token_index=own[None], num_trees=1, whole=False)
        )
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=total - 1).astype(np.float32))
    assert_same(learn(model, scorer, [trees], weights), learn(model, scorer, rows, weights))


def test_the_trees_of_a_pack_do_not_see_each_other() -> None:
    _, scorer = scorer_of("llama", "plain")
    batch = items(7, count=2)
    (together,) = packed(pack_trees, batch, 4096)
    (alone,) = packed(pack_trees, batch[1:], 4096)
    first = batch[0].group.num_sampled_tokens
    of_second = together.token_index[together.scored] >= first
    with torch.no_grad():
        torch.testing.assert_close(
            scorer.logprobs(together)[torch.from_numpy(of_second)], scorer.logprobs(alone), rtol=1e-5, atol=1e-6
        )


# ---- the head -------------------------------------------------------------------------------------------------------

HEADS: dict[str, Callable[[], PreTrainedModel]] = {
    **FAMILIES,
    "bias": lambda: PhiForCausalLM(
        PhiConfig(**{key: value for key, value in COMMON.items() if key != "head_dim"}, initializer_range=0.2)
    ),
    "soft cap": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **COMMON,
            initializer_range=0.5,
            attn_implementation="eager",  # type: ignore[call-arg]
            final_logit_softcapping=3.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
}


def head_and_gradients(model: Any, scorer: Scorer, batch: RowBatch) -> tuple[Tensor, Tensor]:
    return learn(model, scorer, [batch], torch.linspace(-1, 1, int(batch.token_index.max()) + 1))


@pytest.mark.parametrize("name", HEADS)
def test_log_probabilities_from_hidden_states_are_those_of_all_logits(name: str) -> None:
    torch.manual_seed(0)
    model = in_evaluation(HEADS[name]())
    if name == "bias":
        torch.nn.init.normal_(model.lm_head.bias, std=1.0)
    (batch,) = packed(pack, items(1, count=2), 4096)
    chunked = Scorer(model, temperature=TEMPERATURE)
    assert chunked.chunks_head
    plain = Scorer(model, temperature=TEMPERATURE, chunks_head=False)
    assert not plain.chunks_head
    assert_same(head_and_gradients(model, chunked, batch), head_and_gradients(model, plain, batch))
    assert model.config.get_text_config().to_dict().get("final_logit_softcapping") in (None, 3.0)
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_model_that_changes_its_logits_in_another_way_gets_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = {key: value for key, value in COMMON.items() if key != "head_dim"}
    model = in_evaluation(GraniteForCausalLM(GraniteConfig(**config, initializer_range=0.2, logits_scaling=8.0)))
    scorer = Scorer(model, temperature=1.0)
    assert not scorer.chunks_head
    assert "GraniteForCausalLM changes logits after its last layer" in caplog.text
    (batch,) = packed(pack, items(1, count=2), 4096)
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.token_ids), attention_mask=torch.from_numpy(batch.attention_mask)).logits
        rows, columns = np.nonzero(batch.scored)
        own = torch.log_softmax(logits, -1)[rows, columns - 1, batch.token_ids[rows, columns]]
        torch.testing.assert_close(scorer.logprobs(batch), own)


def head_alone(head: torch.nn.Linear, *, chunk_logits: int, cap: float | None = None) -> ChunkedHead:
    class Config:
        final_logit_softcapping = cap

        def get_text_config(self) -> Config:
            return self

    class Body:
        config = Config()

        def get_output_embeddings(self) -> torch.nn.Linear:
            return head

    return ChunkedHead(Body(), temperature=TEMPERATURE, chunk_logits=chunk_logits)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("chunk_logits", [1, 100 * 70, 10**9])
def test_chunks_of_any_size_have_the_gradient_of_the_plain_formula(cap: float | None, chunk_logits: int) -> None:
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 100), torch.randn(3, 90, 16, requires_grad=True)
    wanted = Wanted(torch.randperm(270)[:200], torch.randint(0, 100, (200,)))
    slopes = torch.randn(200)
    found, grads = [], []
    for chunked in (True, False):
        if chunked:
            with head_alone(head, chunk_logits=chunk_logits, cap=cap).answering(wanted):
                chosen = head(hidden)
        else:
            logits = head(hidden.flatten(0, 1)[wanted.places])
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            chosen = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, wanted.targets[:, None])[:, 0]
        found.append(chosen)
        grads.append(torch.autograd.grad((chosen * slopes).sum(), [hidden, head.weight, head.bias]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_head_computes_in_float32_where_the_body_computes_in_bfloat16() -> None:
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(64, 500, bias=False), torch.randn(1, 90, 64)
    wanted = Wanted(torch.arange(90), torch.randint(0, 500, (90,)))
    rounded, low = hidden.bfloat16(), torch.nn.Linear(64, 500, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        low.weight.copy_(head.weight)
        exact = torch.log_softmax(rounded.double() @ low.weight.double().T / TEMPERATURE, -1)
        with head_alone(low, chunk_logits=10**6).answering(wanted):
            found = low(rounded)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact[0, torch.arange(90), wanted.targets], rtol=1e-5, atol=1e-5)


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Bytes of the distinct tensors that autograd keeps for the backward pass."""
    kept: dict[int, int] = {}
    total: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield total
    total.append(sum(kept.values()))


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.found = max(self.found, tensor.numel() * tensor.element_size())
        return made


def bytes_of(model: Any, *, scored: int, tokens: int, chunks_head: bool) -> tuple[int, int]:
    """Kept for the backward pass, and in the largest tensor, for one row with some scored tokens at its end."""
    index = np.full((1, tokens), -1)
    index[0, tokens - scored :] = np.arange(scored)
    batch = RowBatch(
        token_ids=np.random.default_rng(0).integers(0, 500, (1, tokens)),
        attention_mask=np.ones((1, tokens), np.bool_),
        token_index=index,
        num_trees=1,
        whole=True,
    )
    scorer = Scorer(model, temperature=1.0, chunks_head=chunks_head)
    largest = LargestTensor()
    with largest, counting_bytes() as kept:
        loss = scorer.logprobs(batch).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    return kept[0], largest.found


def test_memory_grows_with_scored_tokens_and_never_with_the_vocabulary_times_tokens() -> None:
    torch.manual_seed(0)
    small, large = (
        in_evaluation(LlamaForCausalLM(LlamaConfig(**{**COMMON, "vocab_size": vocabulary, "num_hidden_layers": 1})))
        for vocabulary in (1000, 40_000)
    )
    few, many = (bytes_of(large, scored=scored, tokens=512, chunks_head=True) for scored in (32, 256))
    (other, _) = bytes_of(small, scored=256, tokens=512, chunks_head=True)
    full, full_largest = bytes_of(large, scored=256, tokens=512, chunks_head=False)
    width, weights = COMMON["hidden_size"], 39_000 * COMMON["hidden_size"] * 4
    # A scored token keeps its hidden state, place, target and sum; the vocabulary the output matrix, there anyway.
    assert many[0] - few[0] <= (256 - 32) * (4 * width + 8 + 8 + 4 + 16)
    assert many[0] - other <= 2 * weights + 4096
    assert full - many[0] > 256 * 40_000 * 4 * 0.9  # the softmax that the plain way keeps
    chunk = 4 * max(2**23, 64 * 40_000)
    assert many[1] <= chunk < 512 * 40_000 * 4 <= full_largest


def test_a_model_that_takes_packed_trees_already_is_found_to_take_them_again() -> None:
    model = in_evaluation(FAMILIES["llama"]())
    assert [Scorer(model, temperature=1.0).probe_trees(64) for _ in range(2)] == [True, True]


def test_packed_trees_keep_memory_for_each_token_once() -> None:
    model, scorer = scorer_of("llama", "plain")
    batch = items(5, count=6)
    kept = []
    for layout in (pack, pack_trees):
        batches = packed(layout, batch, 100_000)
        with counting_bytes() as found:
            for rows in batches:
                scorer.logprobs(rows)
        kept.append((found[0], sum(int(rows.attention_mask.sum()) for rows in batches)))
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    (rows_bytes, rows_tokens), (tree_bytes, tree_tokens) = kept
    assert tree_tokens < 0.7 * rows_tokens
    assert (tree_bytes - parameters) / tree_tokens <= 1.1 * (rows_bytes - parameters) / rows_tokens
