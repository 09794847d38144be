"""Every trainable turn is trained once, in the right place, whatever the groups look like."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import group_from_spec, random_group, spec
from tests.oracles import TrainedTurn, is_trainable, num_tips, trained_turns, turn_tokens
from trace_async.core.packing import PackItem, RowBatch, denominators, first_tokens, pack
from trace_async.core.turn_table import TurnTable, make_table
from trace_async.core.types import Group, NodeState, TurnCredit, Verdict
from trace_async.errors import ConfigError, InvariantError

SEEDS = st.integers(min_value=0, max_value=2**32)
PAD = 999


def opinion(group: Group, *, advantage: list[float], mass: list[float], verdicts: list[int] | None = None) -> PackItem:
    return PackItem(
        group=group,
        credit=TurnCredit(
            value=np.zeros(group.num_turns, np.float32),
            advantage=np.array(advantage, np.float32),
            mass=np.array(mass, np.float32),
        ),
        verdicts=np.array(verdicts or [Verdict.TRAIN] * group.num_turns, np.uint8),
        ages=np.arange(group.num_turns, dtype=np.int32),
    )


def random_item(rng: np.random.Generator, number: int) -> PackItem:
    group = random_group(rng, lease_id=f"lease-{number}")
    turns = group.num_turns
    played = group.state != NodeState.FAILED
    return opinion(
        group,
        advantage=(rng.integers(-2, 3, turns) * played).tolist(),
        mass=(rng.integers(0, 4, turns) / 4 * played).tolist(),
        verdicts=rng.integers(0, 3, turns).tolist(),
    )


def random_items(seed: int) -> list[PackItem]:
    rng = np.random.default_rng(seed)
    return [random_item(rng, number) for number in range(int(rng.integers(0, 4)))]


def rows_of(items: list[PackItem], *, bound: int = 1000) -> list[RowBatch]:
    return pack(items, first_tokens=first_tokens(items), pad_id=PAD, micro_batch_tokens=bound)


def told_by(table: TurnTable, j: int, *, context: list[int], action: list[int]) -> TrainedTurn:
    """What is packed of turn j of the table, whose tokens stand behind `context`."""
    first = int(table.token_start[j])
    return TrainedTurn(
        tuple(context),
        tuple(action),
        tuple(table.behaviour_logprobs[first : first + len(action)].tolist()),
        float(table.advantage[j]),
        float(table.mass[j]),
        int(table.age[j]),
        int(table.verdict[j]),
        int(table.depth[j]),
    )


def columns_of(table: TurnTable, batch: RowBatch) -> list[tuple[int, int, list[int]]]:
    """Turn, row and columns of each turn in the batch, by the places of its tokens in the table."""
    rows, columns = np.nonzero(batch.token_index >= 0)
    turns = table.turn[batch.token_index[rows, columns]]
    found = []
    for j in sorted(set(turns.tolist())):
        (row,) = set(rows[turns == j].tolist())
        own = columns[turns == j].tolist()
        assert own == list(range(own[0], own[-1] + 1))
        places = batch.token_index[row, own].tolist()
        assert places == list(range(int(table.token_start[j]), int(table.token_start[j] + table.tokens[j])))
        found.append((j, row, own))
    return found


def read_back(table: TurnTable, batch: RowBatch) -> list[TrainedTurn]:
    """What the batch says about each of its turns, read position by position."""
    found = []
    for j, row, own in columns_of(table, batch):
        assert table.tokens[j] == len(own)
        assert table.scored[j]
        assert batch.scored[row, own].all()
        assert batch.attention_mask[row, : own[-1] + 1].all()
        context, action = batch.token_ids[row, : own[0]].tolist(), batch.token_ids[row, own].tolist()
        found.append(told_by(table, j, context=context, action=action))
    return found


@given(SEEDS, st.integers(64, 400))
def test_the_batches_say_what_a_slow_walk_over_the_turns_says(seed: int, bound: int) -> None:
    items = random_items(seed)
    table = make_table(items)
    packed = [turn for batch in rows_of(items, bound=bound) for turn in read_back(table, batch)]
    assert sorted(packed) == sorted(turn for item in items for turn in trained_turns(item))


@given(SEEDS, st.integers(64, 400))
def test_loss_is_on_for_exactly_the_kept_tokens_and_never_on_the_first(seed: int, bound: int) -> None:
    items = random_items(seed)
    batches = rows_of(items, bound=bound)
    kept = sum(
        len(turn_tokens(item.group, turn).action)
        for item in items
        for turn in range(item.group.num_turns)
        if is_trainable(item, turn)
    )
    assert sum(int(batch.scored.sum()) for batch in batches) == kept
    places = [place for batch in batches for place in batch.token_index[batch.scored].tolist()]
    assert len(set(places)) == len(places) == kept
    for batch in batches:
        assert not batch.scored[:, 0].any()
        assert np.array_equal(batch.scored, batch.token_index >= 0)
        assert not batch.scored[~batch.attention_mask].any()


@given(SEEDS, st.integers(64, 400))
def test_rows_are_as_few_and_as_short_as_can_be_and_batches_keep_their_bound(seed: int, bound: int) -> None:
    items = random_items(seed)
    batches = rows_of(items, bound=bound)
    assert sum(batch.token_ids.shape[0] for batch in batches) == sum(num_tips(item) for item in items)
    lengths: list[int] = []
    for batch in batches:
        assert batch.token_ids.size <= bound
        assert (batch.token_ids[~batch.attention_mask] == PAD).all()
        own = batch.attention_mask.sum(axis=1)
        assert own.max() == batch.token_ids.shape[1]
        assert (batch.scored[np.arange(own.size), own - 1]).all()  # a row ends with its last owned token
        lengths += own.tolist()
    assert lengths == sorted(lengths, reverse=True)


def check_groups_in(items: list[PackItem], batches: list[RowBatch]) -> None:
    """`num_trees` and `whole` of each batch, counted slowly."""
    table = make_table(items)
    groups = [{int(table.group[j]) for j, _, _ in columns_of(table, batch)} for batch in batches]
    for index, (batch, here) in enumerate(zip(batches, groups, strict=True)):
        elsewhere = set().union(*groups[:index], *groups[index + 1 :])
        assert batch.num_trees == len(here)
        assert batch.whole == here.isdisjoint(elsewhere)


@given(SEEDS, st.integers(64, 400))
def test_a_batch_knows_how_many_trees_it_holds_and_whether_all_of_them(seed: int, bound: int) -> None:
    items = random_items(seed)
    check_groups_in(items, rows_of(items, bound=bound))


@given(SEEDS, SEEDS)
def test_the_denominator_is_the_same_whatever_the_verdicts_and_advantages(seed: int, other: int) -> None:
    items = random_items(seed)
    rng = np.random.default_rng(other)
    judged = [
        dataclasses.replace(
            item,
            verdicts=rng.integers(0, 3, item.group.num_turns).astype(np.uint8),
            credit=dataclasses.replace(item.credit, advantage=np.zeros(item.group.num_turns, np.float32)),
        )
        for item in items
    ]
    assert denominators(judged) == denominators(items)


WORKED = group_from_spec(
    [
        spec(
            spec(spec(outcome=1.0, actions=1), spec(outcome=0.0, actions=2), actions=2),
            spec(spec(outcome=0.0, actions=3), actions=2),
            actions=3,
        )
    ]
)
"""Turns r, a, a1, a2, b, b1 with 3, 2, 1, 2, 2, 3 sampled tokens; leaves of 6, 7 and 8 tokens."""
UNIFORM = [1, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3]
HIERARCHICAL = [1, 0.5, 0.25, 0.25, 0.5, 0.5]


def test_the_denominator_counts_a_shared_turn_once_per_leaf_weighted_by_the_leaf() -> None:
    uniform = opinion(WORKED, advantage=[0.0] * 6, mass=UNIFORM)
    hierarchical = opinion(WORKED, advantage=[0.0] * 6, mass=HIERARCHICAL)
    assert denominators([uniform]).tokens == pytest.approx((6 + 7 + 8) / 3)
    assert denominators([hierarchical]).tokens == pytest.approx(6 / 4 + 7 / 4 + 8 / 2)
    assert denominators([uniform, hierarchical]).tokens == pytest.approx(7 + 7.25)
    assert denominators([]).tokens == 0.0


def test_a_worked_tree_becomes_one_row_per_leaf_and_shared_turns_are_trained_in_the_first() -> None:
    item = opinion(WORKED, advantage=[0.1, 0.5, 0.25, -0.25, -0.5, 0.75], mass=HIERARCHICAL)
    (batch,) = rows_of([item])
    # prompt 3, r 3+1, a 2+1, a1 1 / a2 2, b 2+1, b1 3; the longest row first, so r is still owned by a1's row.
    assert batch.attention_mask.sum(axis=1).tolist() == [13, 12, 11]
    table = make_table([item])
    trained = [sorted(set(table.turn[row[row >= 0]].tolist())) for row in batch.token_index]
    assert trained == [[4, 5], [3], [0, 1, 2]]
    trained_advantages = [table.advantage[turns].tolist() for turns in trained]
    assert trained_advantages == [[-0.5, 0.75], [-0.25], [np.float32(0.1), 0.5, 0.25]]
    assert table.depth.tolist() == [1, 2, 3, 3, 2, 3]
    assert table.age.tolist() == [0, 1, 2, 3, 4, 5]
    assert table.tokens.tolist() == [3, 2, 1, 2, 2, 3]
    # The table's tokens: r 0-2, a 3-4, a1 5, a2 6-7, b 8-9, b1 10-12.
    assert batch.token_index[1].tolist() == [*[-1] * 10, 6, 7, -1]
    assert batch.num_trees == 1
    assert batch.whole


def test_a_row_ends_where_nothing_below_is_trained() -> None:
    context, train = Verdict.CONTEXT, Verdict.TRAIN
    item = opinion(
        WORKED,
        advantage=[1.0, 1.0, 1.0, 1.0, 0.0, 1.0],
        mass=[1.0, 1.0, 0.0, 1.0, 1.0, 1.0],
        verdicts=[train, train, train, context, train, context],
    )
    (batch,) = rows_of([item])
    assert batch.token_ids.shape == (1, 3 + 4 + 2)
    assert [j for j, _, _ in columns_of(make_table([item]), batch)] == [0, 1]


def test_a_failed_turn_is_never_trained_whatever_is_said_about_it() -> None:
    group = group_from_spec([spec(spec(outcome=1.0), spec(failed=True))])
    item = opinion(group, advantage=[1.0] * 3, mass=[1.0] * 3)
    (batch,) = rows_of([item])
    assert [j for j, _, _ in columns_of(make_table([item]), batch)] == [0, 1]


def test_nothing_to_train_is_no_batch() -> None:
    item = opinion(WORKED, advantage=[0.0] * 6, mass=HIERARCHICAL)
    assert rows_of([item]) == []
    assert rows_of([]) == []


def test_a_row_over_the_bound_is_refused_with_the_cure() -> None:
    item = opinion(WORKED, advantage=[1.0] * 6, mass=HIERARCHICAL)
    with pytest.raises(ConfigError, match=r"lease-0 has 13 tokens.*micro_batch_tokens = 12.*max_context_tokens"):
        rows_of([item], bound=12)
    assert len(rows_of([item], bound=13)) == 3


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_credit_that_is_no_number_stops_the_run_with_the_turn(broken: float) -> None:
    item = opinion(WORKED, advantage=[1.0, broken, 0.0, 0.0, 0.0, 0.0], mass=HIERARCHICAL)
    with pytest.raises(InvariantError, match=r"lease-0 turn 1: advantage (nan|inf)"):
        rows_of([item])
    item = opinion(WORKED, advantage=[1.0] * 6, mass=[1.0, 1.0, -0.5, 1.0, 1.0, 1.0])
    with pytest.raises(InvariantError, match=r"lease-0 turn 2: advantage 1\.0, mass -0\.5"):
        rows_of([item])


def test_opinions_of_another_group_are_refused() -> None:
    item = opinion(WORKED, advantage=[1.0] * 6, mass=HIERARCHICAL)
    with pytest.raises(InvariantError, match=r"ages \(5,\) must all have 6 entries"):
        rows_of([dataclasses.replace(item, ages=item.ages[:5])])
