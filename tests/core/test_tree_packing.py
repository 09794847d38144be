"""A packed tree shows each token exactly what it saw when it was sampled, and nothing else."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_packing import (
    HIERARCHICAL,
    PAD,
    SEEDS,
    WORKED,
    check_groups_in,
    columns_of,
    opinion,
    random_items,
    told_by,
)
from tests.oracles import TrainedTurn, num_tips, trained_turns
from trace_async.core.packing import PackItem, RowBatch, first_tokens
from trace_async.core.rows import plan_rows, plan_rows_depth_first
from trace_async.core.tree_packing import TreeBatch, find_chains, pack_trees
from trace_async.core.tree_pieces import Piece, cut_tree, fill_packs
from trace_async.core.turn_table import TurnTable, make_table
from trace_async.errors import ConfigError

LONGEST_PATH = 3 + 4 * 4 + 3 * 3
"""Tokens of the longest path of a random group."""


def trees_of(items: list[PackItem], *, bound: int = 1000) -> list[RowBatch]:
    return pack_trees(items, first_tokens=first_tokens(items), micro_batch_tokens=bound)


def path_of(batch: TreeBatch, column: int) -> list[int]:
    """Columns visible to a token, itself included, in the order of their positions."""
    places = np.arange(batch.token_ids.shape[1])
    columns = np.flatnonzero((places <= column) & (column < batch.subtree_end[0]))
    order = columns[np.argsort(batch.positions[0, columns], kind="stable")]
    assert batch.positions[0, order].tolist() == list(range(order.size))
    path: list[int] = order.tolist()
    return path


def read_back(table: TurnTable, batch: RowBatch) -> list[TrainedTurn]:
    """What the batch says about each of its turns, read along what its tokens may see."""
    assert isinstance(batch, TreeBatch)
    found = []
    for j, row, columns in columns_of(table, batch):
        assert row == 0
        path = path_of(batch, columns[-1])
        assert path[-len(columns) :] == columns
        for place, column in enumerate(path[1:], start=1):
            assert batch.predecessor[0, column] == path[place - 1]
        tokens = batch.token_ids[0, path].tolist()
        split = len(path) - len(columns)
        found.append(told_by(table, j, context=tokens[:split], action=tokens[split:]))
    return found


@given(SEEDS, st.integers(LONGEST_PATH, 400))
def test_packed_trees_say_what_a_slow_walk_over_the_turns_says(seed: int, bound: int) -> None:
    items = random_items(seed)
    table, batches = make_table(items), trees_of(items, bound=bound)
    told = [turn for batch in batches for turn in read_back(table, batch)]
    assert sorted(told) == sorted(turn for item in items for turn in trained_turns(item))
    check_groups_in(items, batches)
    for batch in batches:
        assert batch.token_ids.size <= bound
        assert batch.attention_mask.all()  # no padding
        assert PAD not in batch.token_ids
        assert not batch.scored[:, 0].any()


@given(SEEDS, st.integers(LONGEST_PATH, 200))
def test_a_token_sees_the_walk_over_its_predecessors_and_so_do_chains(seed: int, bound: int) -> None:
    for batch in trees_of(random_items(seed), bound=bound):
        assert isinstance(batch, TreeBatch)
        walks: list[list[int]] = []
        for column, above in enumerate(batch.predecessor[0].tolist()):
            walks.append([column] if above == column else [*walks[above], column])
            assert path_of(batch, column) == walks[column]
        chains = find_chains(batch)
        assert [column for chain in chains for column in range(chain.start, chain.end)] == list(range(len(walks)))
        for chain in chains:
            above = [column for start, end in chain.above for column in range(start, end)]
            for column in range(chain.start, chain.end):
                assert [*above, *range(chain.start, column + 1)] == walks[column]


@given(SEEDS)
def test_there_are_as_many_chains_as_ends_and_the_first_is_the_longest_path(seed: int) -> None:
    for item in random_items(seed):
        for batch in trees_of([item]):
            assert isinstance(batch, TreeBatch)
            chains = find_chains(batch)
            assert len(chains) == num_tips(item)
            assert chains[0].end - chains[0].start == int(batch.positions.max()) + 1


@given(SEEDS)
def test_depth_first_rows_are_the_same_paths_and_what_two_share_all_between_share(seed: int) -> None:
    for item in random_items(seed):
        rows = plan_rows_depth_first(item, 0)
        assert sorted((row.path, row.length) for row in rows) == sorted(
            (row.path, row.length) for row in plan_rows(item, 0)
        )
        owned = [turn for row in rows for turn in row.owned]
        assert sorted(owned) == sorted(turn for row in plan_rows(item, 0) for turn in row.owned)
        assert all(set(row.owned) <= set(row.path) for row in rows)
        for turn in range(item.group.num_turns):
            through = [index for index, row in enumerate(rows) if turn in row.path]
            assert through == list(range(through[0], through[-1] + 1)) if through else True


def tokens_held(item: PackItem, rows: tuple[tuple[int, ...], ...]) -> int:
    """Tokens of some paths with shared ones once, an end's reply left out."""
    group, ends = item.group, {path[-1] for path in rows}
    turns = {turn for path in rows for turn in path}
    replies = sum(int(group.observation_lengths[turn]) for turn in turns - ends)
    return group.prompt_ids.size + replies + sum(int(group.action_lengths[turn]) for turn in turns)


@given(SEEDS, st.integers(LONGEST_PATH, 90))
def test_no_other_cuts_of_the_same_order_repeat_fewer_tokens(seed: int, bound: int) -> None:
    for index, item in enumerate(random_items(seed)):
        paths = [row.path for row in plan_rows_depth_first(item, index)]
        pieces = cut_tree(item, index, bound=bound)
        assert [row.path for piece in pieces for row in piece.rows] == paths
        assert all(piece.length == tokens_held(item, tuple(row.path for row in piece.rows)) for piece in pieces)
        assert all(piece.length <= bound for piece in pieces)
        best = None
        for count in range(len(paths)):
            for inner in combinations(range(1, len(paths)), count):
                cuts = [0, *inner, len(paths)]
                held = [tokens_held(item, tuple(paths[a:b])) for a, b in pairwise(cuts)]
                if max(held) <= bound and (best is None or sum(held) < best):
                    best = sum(held)
        assert sum(piece.length for piece in pieces) == (best or 0)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_packs_hold_every_piece_once_within_the_bound_and_no_two_would_fit_into_one(
    lengths: list[int], bound: int
) -> None:
    packs = fill_packs([Piece(index, (), length) for index, length in enumerate(lengths)], bound=bound)
    assert sorted(piece.item for pack in packs for piece in pack) == list(range(len(lengths)))
    sums = [sum(piece.length for piece in pack) for pack in packs]
    assert all(total <= bound for total in sums)
    assert all(a + b > bound for a, b in combinations(sums, 2))


def test_the_worked_tree_holds_each_token_once() -> None:
    item = opinion(WORKED, advantage=[0.1, 0.5, 0.25, -0.25, -0.5, 0.75], mass=HIERARCHICAL)
    (batch,) = trees_of([item])
    assert isinstance(batch, TreeBatch)
    # prompt 3, r 3+1, b 2+1, b1 3, a 2+1, a2 2, a1 1: 19 tokens where path rows have 13 + 12 + 11.
    assert batch.token_ids.shape == (1, 19)
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 7, 8, 9, 10, 11, 10]
    assert batch.predecessor[0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 6, 13, 14, 15, 16, 15]
    assert batch.subtree_end[0].tolist() == [*[19] * 7, *[13] * 6, *[19] * 3, 18, 18, 19]
    # The table's tokens: r 0-2, a 3-4, a1 5, a2 6-7, b 8-9, b1 10-12.
    expected = [-1, -1, -1, 0, 1, 2, -1, 8, 9, -1, 10, 11, 12, 3, 4, -1, 6, 7, 5]
    assert batch.token_index[0].tolist() == expected
    assert [(c.start, c.end, c.above) for c in find_chains(batch)] == [
        (0, 13, ()),
        (13, 18, ((0, 7),)),
        (18, 19, ((0, 7), (13, 16))),
    ]


def test_a_tree_over_the_bound_is_cut_where_little_is_repeated() -> None:
    item = opinion(WORKED, advantage=[1.0] * 6, mass=HIERARCHICAL)
    first, second = trees_of([item], bound=13)
    # b's path is 13 tokens; a's two paths are 13 together, of which 7 (prompt and r) are repeated.
    assert (first.token_ids.size, second.token_ids.size) == (13, 13)
    assert (second.token_index[0] >= 0).tolist() == [*[False] * 7, True, True, False, True, True, True]
    assert not first.whole
    assert not second.whole


def test_several_trees_fill_a_pack_without_padding() -> None:
    item = opinion(WORKED, advantage=[1.0] * 6, mass=HIERARCHICAL)
    first, second = trees_of([item] * 5, bound=19 * 3)
    assert (first.token_ids.size, second.token_ids.size) == (57, 38)
    assert (first.num_trees, second.num_trees) == (3, 2)
    assert first.whole


def test_a_path_over_the_bound_is_refused_with_the_cure() -> None:
    item = opinion(WORKED, advantage=[1.0] * 6, mass=HIERARCHICAL)
    with pytest.raises(ConfigError, match=r"lease-0 has 13 tokens.*micro_batch_tokens = 12.*max_context_tokens"):
        trees_of([item], bound=12)
    assert len(trees_of([item], bound=13)) == 2
    assert trees_of([], bound=12) == []
