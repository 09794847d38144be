"""Every file that ships in configs/ loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trace_async.app.checks import check_parts
from trace_async.app.plan import make_plan
from trace_async.app.plan_inputs import Request
from trace_async.config_check import leaf_values
from trace_async.config_load import load_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("**/*.toml"))

ELSEWHERE = {"multihop_qwen3_gpu.toml"}
"""Whose data, model and GPUs are elsewhere: planned, not started."""

NO_METHOD = {"repeatable.toml", *(path.name for path in CONFIGS if path.name.startswith("multihop_"))}
"""Which are about something else than a method."""


def test_there_are_configurations() -> None:
    assert {"quickstart.toml", "grpo.toml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_configuration_can_run_and_has_its_own_run_folder(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    assert config.run.dir == f"runs/{path.stem}"
    if path.name == "multihop_smollm2.toml":  # its policy and data are the user's: tests/test_warm_start_multihop.py
        return
    if path.name in ELSEWHERE:
        assert make_plan(config, Request()).problems == []
        return
    check_parts(config)


def test_the_repeatable_configuration_is_what_its_documentation_says() -> None:
    text = (CONFIGS[0].parent.parent / "docs" / "resume.md").read_text(encoding="utf-8")
    values = dict(leaf_values(load_config(CONFIGS[0].parent / "repeatable.toml")))
    rows = re.findall(r"^\| `([a-z_.]+) = (\w+)` \|", text, re.MULTILINE)
    assert len(rows) >= 6
    for key, value in rows:
        assert str(values[key]).lower() == value, key


def test_the_table_of_methods_names_what_the_configurations_choose() -> None:
    text = (CONFIGS[0].parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = re.findall(r"\(\.\./configs/(\w+\.toml)\) \| `(\w+)` \| `(\w+)` \|(.*?)\| `(\w+)`", text)
    assert {row[0] for row in rows} == {path.name for path in CONFIGS} - NO_METHOD
    for name, roots, tree, predictors, credit in rows:
        config = load_config(CONFIGS[0].parent / name)
        assert (config.tree.root_allocator, config.tree.allocator, config.learner.credit) == (roots, tree, credit), name
        assert not predictors.strip() or f"`{config.predictor.kind}`" in predictors, name
