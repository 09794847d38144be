"""What a run says at its end, from fabricated run folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trace_async.app.report import Summary, summarize, summary_lines, write_report
from trace_async.metrics import STEP, MetricsWriter
from trace_async.run_folder import RunFolder, write_json


def played(sampled: float, greedy: float) -> dict[str, object]:
    return {
        "sampled": {
            "success": sampled,
            "success_low": sampled - 0.04,
            "success_high": sampled + 0.04,
            "num_played": 512,
        },
        "greedy": {"success": greedy, "num_played": 512},
    }


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of four steps with both evaluations and a policy."""
    folder = RunFolder(tmp_path / "run")
    folder.policy.mkdir(parents=True)
    with MetricsWriter(folder.metrics) as writer:
        for step in range(1, 5):
            writer.write(
                {
                    STEP: step,
                    "training/version": step,
                    "rollout/success": 0.4 + 0.1 * step,
                    "rollout/sampled_tokens_total": 1000 * step,
                    "rollout/effective_ratio": 0.5,
                    "staleness/age_mean": 0.5 * step,
                    "staleness/age_max": min(step, 3),
                    "groups/trained_total": 20 * step,
                    "groups/flat_total": 2 * step,
                    "groups/rejected_total": step // 4,
                }
            )
    write_json(folder.evaluation("before"), played(0.43, 0.71))
    write_json(folder.evaluation("after"), played(0.74, 0.79))
    return folder


def test_the_summary_holds_the_numbers_of_the_run(folder: RunFolder) -> None:
    assert summarize(folder, name="test", wall_s=141.26) == Summary(
        name="test",
        success_before=0.43,
        success_after=0.74,
        success_after_low=0.70,
        success_after_high=0.78,
        greedy_before=0.71,
        greedy_after=0.79,
        heldout_tasks=512,
        wall_s=141.3,
        sampled_tokens=4000,
        versions=4,
        steps=4,
        max_age_steps=3,
        mean_age_steps=1.25,
        groups_trained=80,
        groups_flat=8,
        groups_rejected=1,
        policy=str(folder.policy),
    )


def test_the_report_leaves_a_summary_and_a_picture(folder: RunFolder) -> None:
    summary = write_report(folder, name="test", wall_s=1.0)
    saved = json.loads(folder.summary.read_text(encoding="utf-8"))
    assert Summary(**saved) == summary
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    assert folder.curve.stat().st_size > 10_000


def test_the_end_is_told_in_five_lines(folder: RunFolder) -> None:
    lines = summary_lines(summarize(folder, name="test", wall_s=141.2), folder)
    assert len(lines) == 5
    text = "\n".join(lines)
    for part in ("sampled 43.0 % -> 74.0 %", "greedy 71.0 % -> 79.0 %", "70.0 % to 78.0 %", "4,000 sampled", "2:21"):
        assert part in text
    assert str(folder.policy) in text
    assert "nothing was learned" not in text


def test_a_run_in_which_every_group_was_flat_says_that_nothing_was_learned(folder: RunFolder) -> None:
    lines = summary_lines(replace(summarize(folder, name="test", wall_s=1.0), groups_trained=0), folder)
    assert len(lines) == 5
    assert "nothing was learned" in lines[2]


def test_a_run_that_ended_before_its_first_step_has_a_report_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    summary = write_report(folder, name="test", wall_s=1.0)
    assert (summary.success_before, summary.max_age_steps, summary.policy, summary.steps) == (None, None, None, 0)
    assert "- -> -" in summary_lines(summary, folder)[0]


def test_an_evaluation_without_sampled_play_leaves_that_unknown(folder: RunFolder) -> None:
    write_json(folder.evaluation("after"), {"greedy": {"success": 0.5, "num_played": 10}})
    summary = summarize(folder, name="test", wall_s=1.0)
    assert (summary.success_after, summary.greedy_after, summary.heldout_tasks) == (None, 0.5, 10)
