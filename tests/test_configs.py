"""Every file that ships in configs/ loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_async.config_load import load_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("**/*.toml"))


def test_there_are_configurations() -> None:
    assert {"quickstart.toml", "grpo.toml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_configuration_loads_and_has_its_own_run_folder(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    assert config.run.dir == f"runs/{path.stem}"
