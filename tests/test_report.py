"""What a run says at its end, from fabricated run folders."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from trace_async.app.report import Summary, summarize, summary_lines, write_report
from trace_async.metrics import STEP, MetricsWriter, Value, read_rows
from trace_async.run_folder import RunFolder, write_json

SCORES = ("brier", "constant_brier", "log_loss", "ece", "spearman")


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


def predictor_rows(kind: str, *, outcomes: int, brier: float) -> dict[str, Value]:
    """A step's figures; all outcomes in the bins 4 and 5, predictions a tenth too low."""
    half = outcomes / 2
    return {
        f"predictor/{kind}/outcomes": outcomes,
        f"predictor/{kind}/brier": brier,
        f"predictor/{kind}/constant_brier": 0.25,
        f"predictor/{kind}/log_loss": 2 * brier,
        f"predictor/{kind}/ece": 0.9,
        f"predictor/{kind}/spearman": math.nan if outcomes <= 10 else 0.3,
        f"predictor/{kind}/bins": [[4, half, 0.22 * half, 0.3 * half], [5, half, 0.28 * half, 0.4 * half]],
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
                    "cost/environment_steps_total": 500 * step,
                    "cost/rollout_equivalents_total": 90.5 * step,
                    "cost/nominal_rollouts_total": 80.0 * step,
                    "cost/wall_s_total": 2.25 * step,
                    "cost/generate_s_total": 7.0 * step,
                    "cost/environment_s_total": 0.5 * step,
                    **predictor_rows("prompts", outcomes=10 * step, brier=0.1 * step),
                    **predictor_rows("new_prompts", outcomes=0, brier=math.nan),
                    "allocation/mixed_places": 8,
                    "allocation/mixed_expected": 4.5,
                    "allocation/mixed_realised": step,
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
        costs={
            "sampled_tokens": 4000,
            "environment_steps": 2000,
            "rollout_equivalents": 362,
            "nominal_rollouts": 320,
            "wall_s": 9,
            "generate_s": 28,
            "environment_s": 2,
        },
        calibration={
            "prompts": {
                "outcomes": 100,
                "brier": 0.3,  # (10 x 0.1 + 20 x 0.2 + 30 x 0.3 + 40 x 0.4) / 100
                "constant_brier": 0.25,
                "log_loss": 0.6,
                "ece": 0.1,  # both bins of a twentieth lie in the same tenth
                "spearman": 0.3,
            },
            "new_prompts": {"outcomes": 0, **dict.fromkeys(SCORES)},
            "prefixes": {"outcomes": 0, **dict.fromkeys(SCORES)},
        },
        allocation={
            "effective_ratio": 0.5,
            "mixed_places": 32,
            "mixed_expected": 18,
            "mixed_realised": 10,
            "flips_places": 0,
            "flips_expected": 0,
            "flips_realised": 0,
        },
        policy=str(folder.policy),
    )


def test_the_report_leaves_a_summary_and_two_pictures(folder: RunFolder) -> None:
    summary = write_report(folder, name="test", wall_s=1.0)
    saved = json.loads(folder.summary.read_text(encoding="utf-8"))
    assert Summary(**saved) == summary
    for picture in (folder.curve, folder.reliability):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 10_000


def test_a_step_that_a_resumed_run_made_again_counts_once(folder: RunFolder) -> None:
    once = summarize(folder, name="test", wall_s=1.0)
    with MetricsWriter(folder.metrics) as writer:
        writer.write({**read_rows(folder.metrics)[1], **predictor_rows("prompts", outcomes=20, brier=0.2)})  # type: ignore[dict-item]

    assert summarize(folder, name="test", wall_s=1.0) == once


def test_the_end_is_told_in_six_lines(folder: RunFolder) -> None:
    lines = summary_lines(summarize(folder, name="test", wall_s=141.2), folder)
    assert len(lines) == 6
    text = "\n".join(lines)
    for part in ("sampled 43.0 % -> 74.0 %", "greedy 71.0 % -> 79.0 %", "70.0 % to 78.0 %", "4,000 sampled", "2:21"):
        assert part in text
    for part in ("(362 root rollouts' worth)", "2,000 environment steps", "0.300 (0.250) prompts", "- (-) prefixes"):
        assert part in text
    assert str(folder.policy) in text
    assert "nothing was learned" not in text


def test_a_run_in_which_every_group_was_flat_says_that_nothing_was_learned(folder: RunFolder) -> None:
    lines = summary_lines(replace(summarize(folder, name="test", wall_s=1.0), groups_trained=0), folder)
    assert len(lines) == 6
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
