"""Supervised learning: what is learned is what the assistant said, however it is packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_kit import decoder
from trace_async.core.types import Message
from trace_async.policies.tiny import tiny_model, tiny_tokenizer
from trace_async.policies.warm_start import Conversation, WarmStartConfig, encode, warm_start_packed
from trace_async.policies.warm_start_packing import Encoded, num_said, pack_conversations, pad_conversations
from trace_async.rendering import Renderer
from trace_async.trainer_scoring import Scorer

WORDS = [f"w{number}" for number in range(20)]


@st.composite
def conversations(draw: st.DrawFn) -> list[Encoded]:
    """Some that share a beginning nobody said, some that are alike."""
    stem = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    made = []
    for _ in range(draw(st.integers(1, 5))):
        rest = draw(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8))
        ids = [*stem, *(token for token, _ in rest)]
        made.append(Encoded(ids, [False] * len(stem) + [said for _, said in rest]))
    return made


def test_the_mask_is_what_the_assistant_said_and_how_it_ended() -> None:
    tokenizer = tiny_tokenizer(WORDS)
    turns = [("w1 w2", "w3"), ("w4", "w5 w6"), ("w7 w8 w9", "never used")]
    conversation = Conversation((Message("system", "w10"), Message("user", "w11 w12")), turns)
    ids, said = encode(
        conversation,
        renderer=Renderer(tokenizer),
        answer_ids=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    words = tokenizer.convert_ids_to_tokens(ids)
    assert " ".join(words) == "w10 w11 w12 > w1 w2 <end> w3 > w4 <end> w5 w6 > w7 w8 w9 <end>"
    spoken = [word for word, mine in zip(words, said, strict=True) if mine]
    assert " ".join(spoken) == "w1 w2 <end> w4 <end> w7 w8 w9 <end>"  # every answer with its end, and nothing else


@given(made=conversations(), room=st.integers(0, 20))
def test_every_said_token_is_scored_once_with_its_own_conversation_before_it(made: list[Encoded], room: int) -> None:
    bound = max(len(one.ids) for one in made) + room
    for batches in (pack_conversations(made, bound=bound), pad_conversations(made, bound=bound, pad_id=0)):
        assert all(batch.token_ids.size <= bound for batch in batches)
        scored = sorted(path for batch in batches for path in _scored_paths(batch))
        assert scored == sorted(path for one in made for path in _said_paths(one))
        for batch in batches:
            numbers = batch.token_index[batch.scored]
            assert numbers.tolist() == list(range(numbers.size))


@given(made=conversations())
def test_packed_a_shared_beginning_stands_once(made: list[Encoded]) -> None:
    bound = sum(len(one.ids) for one in made)
    (batch,) = pack_conversations(made, bound=bound)
    shared = 0
    while all(len(one.ids) > shared + 1 and not one.said[shared] for one in made) and (
        len({one.ids[shared] for one in made}) == 1
    ):
        shared += 1
    assert batch.token_ids.size == bound - (len(made) - 1) * shared


def test_a_conversation_over_the_bound_is_refused() -> None:
    long = Encoded([1, 2, 3, 4], [False, True, True, True])
    with pytest.raises(ValueError, match="4 tokens does not fit a batch of 3"):
        pack_conversations([long], bound=3)
    with pytest.raises(ValueError, match="4 tokens does not fit a batch of 3"):
        pad_conversations([long], bound=3, pad_id=0)


@pytest.mark.parametrize("packs_trees", [True, False])
def test_one_step_follows_the_gradient_of_the_mean_over_the_assistants_tokens(packs_trees: bool) -> None:
    rng = np.random.default_rng(0)
    made = [_random(rng, length) for length in (9, 5, 12, 7, 7)]
    model = _model() if packs_trees else decoder("window of 8")
    expected = _plain_loss(model, made)
    expected.backward()  # type: ignore[no-untyped-call]
    slopes = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([slope.norm() for slope in slopes if slope is not None]).norm()
    losses: list[float] = []
    model.zero_grad(set_to_none=True)
    settings = WarmStartConfig(steps=1, learning_rate=1e-3, warmup_steps=1, weight_decay=0.0, max_grad_norm=1e9)
    assert Scorer(model, temperature=1.0).probe_trees(12) is packs_trees
    warm_start_packed(
        model,
        iter([made]),
        pad_id=0,
        micro_batch_tokens=16,
        max_path_tokens=12,
        config=settings,
        on_step=lambda _, loss: losses.append(loss),
    )
    assert losses == pytest.approx([expected.item()], rel=1e-5)
    for parameter, slope in zip(model.parameters(), slopes, strict=True):
        assert parameter.grad is not None
        assert slope is not None
        assert (parameter.grad - slope).abs().max() < 1e-5 * norm


def test_the_loss_of_a_batch_that_is_seen_again_and_again_goes_to_nothing() -> None:
    rng = np.random.default_rng(1)
    made = [_random(rng, length, first=length) for length in (8, 10, 6)]
    losses: list[float] = []
    warm_start_packed(
        _model(),
        iter([made] * 80),
        pad_id=0,
        micro_batch_tokens=12,
        max_path_tokens=12,
        config=WarmStartConfig(steps=80, learning_rate=1e-2, warmup_steps=5),
        on_step=lambda _, loss: losses.append(loss),
    )
    assert losses[0] > 2.0
    assert losses[-1] < 0.2


def test_longest_said_is_the_longest_turn() -> None:
    assert Encoded([0] * 7, [False, True, True, False, True, True, True]).longest_said == 3
    assert Encoded([0, 0], [False, False]).longest_said == 0


def _model() -> torch.nn.Module:
    return tiny_model(tiny_tokenizer(WORDS), seed=0, hidden_size=32, num_layers=2)


def _random(rng: np.random.Generator, length: int, *, first: int = 1) -> Encoded:
    said = [False, False, True, *(rng.random(length - 3) < 0.5).tolist()]
    return Encoded([first, 2, *rng.integers(3, 20, length - 2).tolist()], said)


def _plain_loss(model: torch.nn.Module, made: Sequence[Encoded]) -> torch.Tensor:
    """One conversation after the other, all logits."""
    total = torch.zeros(())
    for one in made:
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([one.ids])).logits[0], -1)
        for place in range(1, len(one.ids)):
            if one.said[place]:
                total = total - logprobs[place - 1, one.ids[place]]
    return total / num_said(made)


def _said_paths(one: Encoded) -> list[tuple[int, ...]]:
    return [tuple(one.ids[: place + 1]) for place, said in enumerate(one.said) if said]


def _scored_paths(batch: object) -> list[tuple[int, ...]]:
    """What each scored token has before it, read from who sees whom."""
    from trace_async.core.packing import RowBatch
    from trace_async.core.tree_packing import TreeBatch

    assert isinstance(batch, RowBatch)
    found = []
    for row, place in zip(*np.nonzero(batch.scored), strict=True):
        ids = batch.token_ids[row]
        if isinstance(batch, TreeBatch):
            sees = [s for s in range(place + 1) if place < batch.subtree_end[0, s]]
            assert batch.positions[0, sees].tolist() == list(range(len(sees)))
            assert len(sees) < 2 or batch.predecessor[0, place] == sees[-2]
            found.append(tuple(ids[sees].tolist()))
        else:
            assert batch.attention_mask[row, : place + 1].all()
            found.append(tuple(ids[: place + 1].tolist()))
    return found
