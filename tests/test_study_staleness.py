"""The staleness study: its cells are what they say, it samples with the trained policy, and its report adds up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.staleness_decoder import PaddedDecoder
from benchmarks.staleness_report import headline, table, write_report
from benchmarks.staleness_run import METHODS, Cell, Run, Sizes, config_of
from benchmarks.study_staleness import AGES, QUICK, cells, read_lines
from trace_async.app.checks import check_parts
from trace_async.app.wiring import policy_path
from trace_async.engines.batched_model import load_model
from trace_async.engines.llama_weights import join
from trace_async.engines.rows import Row

LABELS = {name: method.label for name, method in METHODS.items()}


@pytest.mark.parametrize("cell", cells(AGES, list(METHODS), 1), ids=lambda cell: f"{cell.method}-{cell.age}")
def test_every_cell_is_a_configuration_that_can_run(cell: Cell) -> None:
    config = config_of(cell, Sizes())
    check_parts(config)
    assert config.coordinator.max_age_steps == cell.age


def test_without_a_shelf_the_sampler_is_the_trained_policy() -> None:
    found = Run(Cell(method="none", age=0, seed=0), QUICK, start_rounds={}).play()
    assert found["age_reached"] == 0
    assert found["ess_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert found["max_abs_log_ratio"] < 1e-4


def test_with_a_shelf_of_two_rounds_turns_are_trained_two_versions_late() -> None:
    found = Run(Cell(method="default", age=2, seed=0), QUICK, start_rounds={}).play()
    assert found["age_reached"] == 2
    assert found["steps_at_full_age"] == QUICK.steps - 2
    assert found["max_abs_log_ratio"] > 1e-3


@pytest.mark.slow
def test_rounds_of_the_start_policy_are_shared_between_the_cells_of_a_seed() -> None:
    alone = Run(Cell(method="none", age=2, seed=0), QUICK, start_rounds={}).play()
    shared: dict[Any, Any] = {}
    Run(Cell(method="tis", age=0, seed=0), QUICK, start_rounds=shared).play()
    after = Run(Cell(method="none", age=2, seed=0), QUICK, start_rounds=shared).play()
    assert sorted(shared) == [(0, 0), (0, 1), (0, 2)]
    assert {**after, "cpu_s": 0} == {**alone, "cpu_s": 0}


@torch.inference_mode()
def test_padded_passes_give_the_logits_of_plain_ones() -> None:
    model = load_model(policy_path("builtin:frozenlake-tiny"), threads=1, device=torch.device("cpu"), dtype="float32")
    decoder = PaddedDecoder(join(model), max_rows=8, max_tokens=40)
    rows = [_row([9, 13, 17, 21, 45, 49, 53, 60][:length]) for length in (8, 5)]
    _check(decoder, model, rows)
    for grown in ([5, 2, 49, 3], [6]):
        for row in rows:
            row.tokens += grown
        _check(decoder, model, rows)
    decoder.leave(rows.pop(0))
    rows[0].tokens.append(5)
    rows.append(_row([9, 13, 17, 21, 45, 49, 53, 60, 5, 2, 70, 3]))  # starts as the one that left
    _check(decoder, model, rows)
    assert decoder.reused_tokens >= 10


def _row(tokens: list[int]) -> Row:
    return Row(tokens=tokens, num_prefix=len(tokens), seed=0, greedy=True)


def _check(decoder: PaddedDecoder, model: Any, rows: list[Row]) -> None:
    found = decoder.advance(rows)
    for row, logits in zip(rows, found, strict=True):
        torch.testing.assert_close(logits, model(torch.tensor([row.tokens])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_finished_runs_are_read_again_and_a_torn_line_is_not(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    done = {"method": "lpo", "age": 8, "seed": 3, "sizes": asdict(QUICK)}
    other = {**done, "seed": 4, "sizes": asdict(Sizes())}
    lines.write_text(f"{json.dumps(done)}\n{json.dumps(other)}\n{json.dumps(done)[:20]}", encoding="utf-8")
    assert list(read_lines(lines, QUICK)) == [Cell(method="lpo", age=8, seed=3)]
    assert read_lines(tmp_path / "none.jsonl", QUICK) == {}


def test_changes_are_taken_seed_by_seed_from_the_runs_at_age_0(tmp_path: Path) -> None:
    results = [_result("none", 0, seed, 0.6 + 0.1 * seed) for seed in range(3)]
    results += [_result("default", 8, seed, 0.5 + 0.1 * seed) for seed in range(3)]
    found = headline(results)
    assert found["default"]["8"]["change"] == pytest.approx([-0.1, 0.0], abs=1e-6)
    assert found["none"]["0"]["change"] == pytest.approx([0.0, 0.0])
    assert "8" not in found["none"]
    lines = table(results, LABELS)
    assert "| default | 70.0 ± 24.8 (3) | 60.0 ± 24.8 (3) |" in lines
    write_report(results, LABELS, tmp_path)
    kept = json.loads((tmp_path / "staleness.json").read_text(encoding="utf-8"))
    assert [run["success"] for run in kept["runs"]] == pytest.approx([0.6, 0.7, 0.8, 0.5, 0.6, 0.7])
    assert (tmp_path / "staleness.png").stat().st_size > 1000


def _result(method: str, age: int, seed: int, success: float) -> dict[str, Any]:
    return {
        **{"method": method, "age": age, "seed": seed, "success": success, "greedy": success, "sizes": asdict(QUICK)},
        **{"points": [[2, 0.4], [4, success]], "ess_ratio": 0.9, "kl_k3": 0.01, "vetoed_share": 0.0},
        **{"capped_share": 0.1, "max_abs_log_ratio": None, "skipped_steps": 0, "sampled_tokens": 100},
    }
