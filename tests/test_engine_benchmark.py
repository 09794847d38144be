"""The trees that the engine benchmark asks for: what comes when, and how long it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engine_workload import Growth, Job, Spec

SPEC = Spec(trees=3, roots=4, continuations=5, shared=True, vocabulary=50, seed=3)


def grow(spec: Spec, *, at_once: int) -> tuple[Growth, list[Job]]:
    """Answers with the request's own number, `at_once` requests in flight, the newest answered first."""
    growth, asked, flying = Growth(spec), [], list[Job]()
    while not growth.finished:
        while growth.num_ready and len(flying) < at_once:
            flying.append(growth.take())
            asked.append(flying[-1])
        job = flying.pop()
        growth.answer(job.index, np.full(job.max_tokens, job.index, np.int32))
    return growth, asked


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_every_request_is_asked_once_behind_its_parents_answer(at_once: int) -> None:
    growth, asked = grow(SPEC, at_once=at_once)
    assert sorted(job.index for job in asked) == list(range(len(growth.turns)))
    jobs = {job.index: job for job in asked}
    for turn in growth.turns:
        if turn.parent >= 0:
            parent = jobs[turn.parent]
            start = np.concatenate((parent.prefix, np.full(parent.max_tokens, parent.index, np.int32)))
            assert np.array_equal(jobs[turn.index].prefix[: len(start)], start)
            assert len(jobs[turn.index].prefix) > len(start)


def test_continuations_wait_for_all_root_rollouts_of_their_tree() -> None:
    growth, asked = grow(SPEC, at_once=6)
    order = {job.index: place for place, job in enumerate(asked)}
    for turn in growth.turns:
        roots = [other.index for other in growth.turns if other.tree == turn.tree and other.is_root]
        if not turn.is_root:
            assert order[turn.index] > max(order[root] for root in roots)


def test_unshared_requests_have_the_same_lengths_and_nothing_in_common() -> None:
    _, shared = grow(SPEC, at_once=6)
    _, alone = grow(replace(SPEC, shared=False), at_once=6)
    assert [(j.index, len(j.prefix), j.max_tokens) for j in shared] == [
        (j.index, len(j.prefix), j.max_tokens) for j in alone
    ]
    openings = {tuple(job.prefix[:12].tolist()) for job in alone}
    assert len(openings) == len(alone)
    assert len({tuple(job.prefix[:12].tolist()) for job in shared}) == SPEC.trees


def test_the_longest_context_fits_the_shipped_policys_positions() -> None:
    _, asked = grow(replace(SPEC, trees=40), at_once=32)
    assert max(len(job.prefix) + job.max_tokens for job in asked) <= 512
