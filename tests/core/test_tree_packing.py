"""A packed tree shows each token exactly what it saw when it was sampled, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_packing import HIERARCHICAL, PAD, SEEDS, WORKED, opinion, random_items
from tests.oracles import TrainedTurn, trained_turns
from trace_async.core.packing import RowBatch
from trace_async.core.tree_packing import TreeBatch, pack_trees
from trace_async.errors import ConfigError


def path_of(batch: TreeBatch, row: int, column: int) -> list[int]:
    """Columns visible to a token, itself included, in the order of their positions."""
    columns = np.flatnonzero(batch.visible[row, column])
    order = columns[np.argsort(batch.positions[row, columns], kind="stable")]
    assert batch.positions[row, order].tolist() == list(range(order.size))
    path: list[int] = order.tolist()
    return path


def read_back(batch: RowBatch) -> list[TrainedTurn]:
    """What the batch says about each of its turns, read along what its tokens may see."""
    assert isinstance(batch, TreeBatch)
    found = []
    for j in range(batch.advantage.size):
        rows, columns = np.nonzero(batch.turn_index == j)
        (row,) = set(rows.tolist())
        path = path_of(batch, row, int(columns[-1]))
        assert path[-len(columns) :] == columns.tolist()
        for place, column in enumerate(path[1:], start=1):
            assert batch.predecessor[row, column] == path[place - 1]
        tokens = batch.token_ids[row, path].tolist()
        split = len(path) - len(columns)
        found.append(
            TrainedTurn(
                tuple(tokens[:split]),
                tuple(tokens[split:]),
                tuple(batch.behaviour_logprobs[row, columns].tolist()),
                float(batch.advantage[j]),
                float(batch.mass[j]),
                int(batch.age[j]),
                int(batch.verdict[j]),
                int(batch.depth[j]),
            )
        )
    return found


@given(SEEDS, st.integers(400, 2000))
def test_packed_trees_say_what_a_slow_walk_over_the_turns_says(seed: int, bound: int) -> None:
    items = random_items(seed)
    batches = pack_trees(items, pad_id=PAD, micro_batch_tokens=bound)
    assert sorted(t for batch in batches for t in read_back(batch)) == sorted(
        t for i in items for t in trained_turns(i)
    )
    for batch in batches:
        assert isinstance(batch, TreeBatch)
        assert batch.token_ids.size <= bound
        assert np.array_equal(batch.loss_mask, batch.turn_index >= 0)
        assert (batch.token_ids[~batch.attention_mask] == PAD).all()
        sees = batch.visible.sum(axis=2)
        assert (sees[~batch.attention_mask] == 1).all()  # itself: a row of nothing would be NaN
        assert not batch.visible[:, :, :][~np.tri(sees.shape[1], dtype=bool)[None].repeat(len(sees), 0)].any()


@given(SEEDS, st.integers(0, 120))
def test_groups_over_the_bound_become_path_rows_and_nothing_is_lost(seed: int, max_tree_tokens: int) -> None:
    items = random_items(seed)
    batches = pack_trees(items, pad_id=PAD, micro_batch_tokens=4000, max_tree_tokens=max_tree_tokens)
    trained = sum(len(turn.action) for item in items for turn in trained_turns(item))
    assert sum(batch.num_loss_tokens for batch in batches) == trained
    for batch in batches:
        if isinstance(batch, TreeBatch):
            assert batch.token_ids.shape[1] <= max_tree_tokens


def test_the_worked_tree_holds_each_token_once() -> None:
    item = opinion(WORKED, advantage=[0.1, 0.5, 0.25, -0.25, -0.5, 0.75], mass=HIERARCHICAL)
    (batch,) = pack_trees([item], pad_id=PAD, micro_batch_tokens=1000)
    assert isinstance(batch, TreeBatch)
    # prompt 3, r 3+1, a 2+1, a1 1, a2 2, b 2+1, b1 3: 19 tokens where path rows have 13 + 12 + 11.
    assert batch.token_ids.shape == (1, 19)
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11, 7, 8, 9, 10, 11, 12]
    assert batch.predecessor[0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 11, 6, 13, 14, 15, 16, 17]


def test_a_path_over_the_bound_is_refused_with_the_cure() -> None:
    item = opinion(WORKED, advantage=[1.0] * 6, mass=HIERARCHICAL)
    with pytest.raises(ConfigError, match="micro_batch_tokens = 12"):
        pack_trees([item], pad_id=PAD, micro_batch_tokens=12)
    assert pack_trees([], pad_id=PAD, micro_batch_tokens=12) == []
