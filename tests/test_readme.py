"""What the README shows works as it is written there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from envs.registry import load_environment
from trace_async.app import checks
from trace_async.config import LearnerConfig, PredictorConfig, TreeConfig
from trace_async.config_load import load_config

README = Path(__file__).parent.parent / "README.md"


def block(language: str, *, containing: str = "") -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return next(found for found in blocks if containing in found)


def test_the_example_environment_loads_by_name_and_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "readme_example.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    kit = load_environment("readme_example:make", {})
    task = kit.tasks.task("train", 3)
    assert kit.tasks.task("heldout", 0).task_id != task.task_id

    async def play() -> None:
        episode = kit.make_environment()
        assert (await episode.reset(task, seed=0))[0].role == "user"
        assert not (await episode.step("what?")).valid
        twin = await episode.fork(seed=1)
        won = await twin.step("3")
        assert (won.reward, won.terminated) == (1.0, True)
        other = kit.make_environment()
        other.restore(episode.snapshot())
        assert [(await other.step("1")).truncated for _ in range(4)] == [False, False, False, True]

    asyncio.run(play())


def test_the_example_configuration_fits_the_example_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_env.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my.toml").write_text(block("toml", containing="my_env"), encoding="utf-8")
    checks.check_parts(load_config(tmp_path / "my.toml", ['policy.path="builtin:frozenlake-tiny"']))


def test_the_example_of_methods_is_what_the_defaults_do(tmp_path: Path) -> None:
    (tmp_path / "methods.toml").write_text(block("toml", containing="root_allocator"), encoding="utf-8")
    config = load_config(tmp_path / "methods.toml")
    checks.check_parts(config)
    assert (config.tree.allocator, config.tree.root_allocator) == (TreeConfig().allocator, TreeConfig().root_allocator)
    assert (config.predictor.kind, config.learner.credit) == (PredictorConfig().kind, LearnerConfig().credit)


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    missing = [link for link in links if not link.startswith("http") and not (README.parent / link).exists()]
    assert not missing
