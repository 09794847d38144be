"""The studies of methods: their arithmetic, and that every row can be run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import study_frozenlake, study_multihop
from benchmarks.study_report import draw, interval, table
from benchmarks.study_run import Study, overrides, tokens_to_level
from trace_async.app.checks import check_parts
from trace_async.config_load import load_config

REPO = Path(__file__).parent.parent


STUDIES = (study_frozenlake.STUDY, study_multihop.STUDY)
ROWS = [pytest.param(study, name, id=f"{study.stem}-{name}") for study in STUDIES for name in study.methods]


@pytest.mark.parametrize(("study", "name"), ROWS)
def test_every_method_of_a_study_is_a_configuration_that_can_run(study: Study, name: str) -> None:
    options = [option.removeprefix("--set=") for option in overrides(study, name)]
    config = load_config(REPO / "configs" / f"{study.methods[name].config}.toml", options)
    check_parts(config)
    assert config.learner.max_sampled_tokens == study.tokens


def test_the_price_of_a_level_is_read_between_two_points() -> None:
    curve = [(0.0, 0.2), (100.0, 0.4), (300.0, 0.8)]
    assert tokens_to_level(curve, 0.4) == 100
    assert tokens_to_level(curve, 0.5) == 150
    assert tokens_to_level(curve, 0.1) == 0
    assert tokens_to_level(curve, 0.9) is None


def test_an_interval_is_students() -> None:
    mean, half = interval([0.4, 0.5, 0.6])
    assert mean == pytest.approx(0.5)
    assert half == pytest.approx(4.303 * 0.1 / math.sqrt(3), abs=1e-4)
    assert math.isnan(interval([0.4, 0.5])[1])


def test_results_become_a_table_and_pictures(tmp_path: Path) -> None:
    results = [
        {
            "method": name,
            "seed": seed,
            "success": 0.4 + 0.01 * seed,
            "new_world": 0.25,
            "curve": [[0, 0.2], [500, 0.3], [1000, 0.4 + 0.01 * seed]],
            "effective_ratio": 0.5,
            "effective_curve": [[500.0, 0.6], [1000.0, 0.4]],
            "tokens_to_level": 700 if seed else None,
            "predictor": {"brier": 0.2, "constant_brier": None},
            "age_mean": 1.5,
            "age_max": 4,
        }
        for name in ("grpo", "trace")
        for seed in (0, 1)
    ]
    labels = {"grpo": "GRPO", "trace": "TRACE"}
    lines = table(results, labels, also=["new_world"])
    assert len(lines) == 4
    assert "700 (1 of 2)" in lines[2]
    assert "0.200 (-)" in lines[3]
    assert "| 40.5 % | 25.0 % | 50.0 % |" in lines[2]
    assert {line.count("|") for line in lines} == {9}  # eight columns
    draw(results, labels, tmp_path, stem="figure", title="success")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert not (tmp_path / "figure_ablation.png").exists()
    stages = ("random_tree", "trace_prefix", "trace_root", "trace")
    draw(results, {name: name for name in stages}, tmp_path, stem="figure", title="success")
    assert (tmp_path / "figure_ablation.png").stat().st_size > 1000
