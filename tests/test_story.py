"""A live tree can be asked where it stands at any moment."""

from __future__ import annotations

from tests.builders import make_lease
from trace_async.acting.story import Tally, TreeStory
from trace_async.core.types import ROOT


def test_a_tree_whose_last_node_has_left_and_whose_task_has_not_woken_still_has_a_phase() -> None:
    now = [1.0]
    story = TreeStory(make_lease(), clock=lambda: now[0], tally=Tally())
    story.enter(1, "generate")
    story.leave(ROOT)
    now[0] = 3.0
    story.leave(1)
    now[0] = 4.0
    phase = story.phase()
    assert (phase.node_id, phase.phase, phase.waiting_s, phase.age_s) == (ROOT, "environment", 1.0, 3.0)
