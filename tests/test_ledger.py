"""The ledger: what it said is durable even against kill -9, each group is consumed once, and the counts add up."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from tests.builders import chain_group, make_lease
from trace_async.core.types import GroupVerdict
from trace_async.errors import InvariantError, UserError
from trace_async.ledger import Ledger, LedgerCounts
from trace_async.transport import wire

FRAMES = wire.encode_group(chain_group())


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db") as opened:
        yield opened


def ids_on_shelf(ledger: Ledger) -> list[str]:
    return [group_id for group_id, _ in ledger.shelved()]


def with_groups(ledger: Ledger, *names: str) -> None:
    ledger.issue(*(make_lease(lease_id=name) for name in names))
    for name in names:
        assert ledger.receive(name, FRAMES)


def test_a_lease_goes_from_issued_over_the_shelf_to_consumed(ledger: Ledger) -> None:
    ledger.issue(make_lease(lease_id="a"), make_lease(lease_id="b"))
    assert ledger.counts() == LedgerCounts(issued=2, live=2, shelved=0, consumed=0, rejected=0)
    assert ledger.receive("a", FRAMES)
    assert ledger.live() == [make_lease(lease_id="b")]
    assert list(ledger.shelved()) == [("a", FRAMES)]
    ledger.mark_consumed(3, {"a": GroupVerdict.FLAT})
    ledger.reject("b", "3 attempts failed")
    assert ledger.verdicts() == {"a": GroupVerdict.FLAT}
    assert ledger.counts() == LedgerCounts(issued=2, live=0, shelved=0, consumed=1, rejected=1)


def test_the_shelf_is_in_order_of_arrival(ledger: Ledger) -> None:
    ledger.issue(*(make_lease(lease_id=name) for name in "abc"))
    for name in "cab":
        ledger.receive(name, FRAMES)
    assert ids_on_shelf(ledger) == ["c", "a", "b"]


def test_a_group_that_comes_again_changes_nothing(ledger: Ledger) -> None:
    with_groups(ledger, "a")
    assert not ledger.receive("a", [b"other"])
    assert list(ledger.shelved()) == [("a", FRAMES)]
    ledger.mark_consumed(1, {"a": GroupVerdict.TRAINED})
    assert not ledger.receive("a", FRAMES)
    assert ids_on_shelf(ledger) == []


def test_a_late_group_of_a_rejected_lease_may_come_in(ledger: Ledger) -> None:
    ledger.issue(make_lease(lease_id="a"))
    ledger.reject("a", "not finished in time")
    assert ledger.receive("a", FRAMES)
    assert ledger.counts() == LedgerCounts(issued=1, live=0, shelved=1, consumed=0, rejected=0)


def test_a_rejected_group_loses_its_bytes_and_its_place(ledger: Ledger) -> None:
    with_groups(ledger, "a", "b")
    ledger.reject("a", "unreadable")
    assert ids_on_shelf(ledger) == ["b"]


@pytest.mark.parametrize(
    ("move", "fault"),
    [
        (lambda ledger: ledger.issue(make_lease(lease_id="live")), "live was issued before"),
        (lambda ledger: ledger.receive("stranger", FRAMES), "stranger was never issued"),
        (lambda ledger: ledger.reject("stranger", ""), "stranger was never issued"),
        (lambda ledger: ledger.reject("done", "late"), "done was consumed"),
        (lambda ledger: ledger.mark_consumed(2, {"live": GroupVerdict.TRAINED}), "live is ISSUED, step 2"),
        (lambda ledger: ledger.mark_consumed(2, {"done": GroupVerdict.TRAINED}), "done is CONSUMED"),
        (lambda ledger: ledger.mark_consumed(2, dict.fromkeys(("ready", "live"), GroupVerdict.FLAT)), "live is ISSUED"),
    ],
)
def test_an_impossible_move_is_named_and_changes_nothing(ledger: Ledger, move: object, fault: str) -> None:
    with_groups(ledger, "done", "ready")
    ledger.mark_consumed(1, {"done": GroupVerdict.TRAINED})
    ledger.issue(make_lease(lease_id="live"))
    before = ledger.counts()
    assert callable(move)
    with pytest.raises(InvariantError, match=fault):
        move(ledger)
    assert ledger.counts() == before
    assert ids_on_shelf(ledger) == ["ready"]


def test_rewinding_returns_later_groups_to_the_shelf_and_leaves_earlier_ones(ledger: Ledger) -> None:
    with_groups(ledger, "a", "b", "c", "d")
    for step, name in enumerate("bdac", start=1):
        ledger.mark_consumed(step, {name: GroupVerdict.TRAINED})
    assert ledger.rewind(2) == ["a", "c"]
    assert list(ledger.shelved()) == [("a", FRAMES), ("c", FRAMES)]
    assert set(ledger.verdicts()) == {"b", "d"}
    ledger.mark_consumed(3, {"c": GroupVerdict.TRAINED})
    assert ids_on_shelf(ledger) == ["a"]


def test_forgetting_drops_bytes_that_no_checkpoint_needs_and_forbids_to_rewind_beyond(ledger: Ledger) -> None:
    with_groups(ledger, "a", "b", "c")
    for step, name in enumerate("abc", start=1):
        ledger.mark_consumed(step, {name: GroupVerdict.TRAINED})
    assert ledger.forget(2) == 2
    assert ledger.forget(2) == 0
    assert ledger.rewind(2) == ["c"]
    with pytest.raises(InvariantError, match=r"step 0.*\['a', 'b'\]"):
        ledger.rewind(0)
    assert ids_on_shelf(ledger) == ["c"]


def test_another_layout_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        assert ledger.counts().issued == 0
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(UserError, match="layout 99, this version reads 2: use a new run folder"):
        Ledger(path)


WRITER = """
import sys
from itertools import count
from pathlib import Path
from tests.builders import make_lease
from tests.test_ledger import FRAMES
from trace_async.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]))
for number in count():
    name = f"g{number}"
    ledger.issue(make_lease(lease_id=name))
    ledger.receive(name, FRAMES)
    print(name, flush=True)  # the acknowledgement
"""


@pytest.mark.parametrize("num_acks", [1, 40])
def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path, num_acks: int) -> None:
    path = tmp_path / "ledger.db"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(num_acks)]
        writer.kill()  # wherever it is: between receive and ack, or inside a commit
        acknowledged += writer.stdout.read().split()
    with Ledger(path) as ledger:
        found = ids_on_shelf(ledger)
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) - len(acknowledged) in (0, 1)  # one may be durable whose acknowledgement never left
        assert all(frames == FRAMES for _, frames in ledger.shelved())
        counts = ledger.counts()
        assert counts.issued == counts.live + counts.shelved
        assert counts.live <= 1


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of legal moves, with the file closed and opened anywhere, against a dictionary."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.db"
        self.states: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self.step = 0

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger(self.path)

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    @rule(target=leases)
    def issue(self) -> str:
        name = f"lease-{len(self.states)}"
        self.ledger.issue(make_lease(lease_id=name))
        self.states[name] = "live"
        return name

    @rule(name=leases)
    def receive(self, name: str) -> None:
        new = self.states[name] in ("live", "rejected")
        assert self.ledger.receive(name, FRAMES) is new
        if new:
            self.states[name] = "shelved"

    @rule(name=leases)
    def reject(self, name: str) -> None:
        if self.states[name] != "consumed":
            self.ledger.reject(name, "why not")
            self.states[name] = "rejected"

    @rule(share=st.floats(0, 1))
    def consume(self, share: float) -> None:
        shelf = ids_on_shelf(self.ledger)
        taken = shelf[: round(share * len(shelf))]
        self.step += 1
        self.ledger.mark_consumed(self.step, dict.fromkeys(taken, GroupVerdict.TRAINED))
        self.states.update(dict.fromkeys(taken, "consumed"))
        self.steps.update(dict.fromkeys(taken, self.step))

    @rule(back=st.integers(0, 3))
    def rewind(self, back: int) -> None:
        self.step = max(0, self.step - back)
        later = {name for name, step in self.steps.items() if step > self.step}
        assert set(self.ledger.rewind(self.step)) == later
        self.states.update(dict.fromkeys(later, "shelved"))
        self.steps = {name: step for name, step in self.steps.items() if name not in later}

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)

    @invariant()
    def counts_reconcile(self) -> None:
        if self.states:
            counts = self.ledger.counts()
            assert counts.issued == len(self.states) == sum(counts[1:])
            for name, count in counts._asdict().items():
                if name != "issued":
                    assert count == list(self.states.values()).count(name)
            assert set(ids_on_shelf(self.ledger)) == {name for name, state in self.states.items() if state == "shelved"}


TestAnySequenceOfMoves = LedgerMachine.TestCase
TestAnySequenceOfMoves.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
