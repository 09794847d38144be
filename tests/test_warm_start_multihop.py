"""The configuration of SmolLM2 on real questions: what it trains on, asks and searches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trace_async.app.checks import check_parts
from trace_async.app.warm_start_script import Script, load_encoder
from trace_async.app.wiring import build_kit, close_kit, policy_path
from trace_async.config import Config
from trace_async.config_load import load_config
from trace_async.environment import EnvironmentKit

CONFIG = Path(__file__).parent.parent / "configs" / "multihop_smollm2.toml"
DATA = Path(__file__).parent.parent.parent / "shared" / "data"
TINY = "builtin:frozenlake-tiny"
"""Any policy will do: its tokens are words."""

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the samples of real data sets, see their README")


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG, (f"environment.options.data={DATA}", f"policy.path={TINY}"))


@pytest.fixture(scope="module")
def kit(config: Config) -> Iterator[EnvironmentKit]:
    kit = build_kit(config)
    yield kit
    asyncio.run(close_kit(kit))


def test_the_configuration_can_run_and_uses_every_question(config: Config, kit: EnvironmentKit) -> None:
    check_parts(config)
    sizes = {split: kit.tasks.size(split) for split in ("train", "heldout", "hotpotqa", "2wiki", "musique")}
    assert sizes == {"train": 576, "heldout": 566, "hotpotqa": 200, "2wiki": 121, "musique": 145}
    assert config.prompts.num_train == 576
    assert config.prompts.num_heldout == 566
    sets = {str(kit.tasks.task("train", index).data["dataset"]) for index in range(576)}
    assert sets == {"hotpotqa", "2wiki", "musique"}


def test_no_question_is_trained_on_and_asked_later(kit: EnvironmentKit) -> None:
    def questions(split: str) -> set[str]:
        size = kit.tasks.size(split)
        assert size is not None
        return {str(kit.tasks.task(split, index).data["question"]) for index in range(size)}

    train = questions("train")
    for split in ("heldout", "hotpotqa", "2wiki", "musique"):
        assert not train & questions(split)


def test_the_script_finds_its_pages_and_answers_right(config: Config, kit: EnvironmentKit) -> None:
    async def play() -> tuple[list[float], list[float]]:
        assert kit.demonstrate is not None
        tasks = [kit.tasks.task("train", index) for index in range(0, 576, 12)]
        able = [await kit.demonstrate(task, np.random.default_rng(0), 0.0) for task in tasks]
        unable = [await kit.demonstrate(task, np.random.default_rng(0), 1.0) for task in tasks]
        return [one.reward for one in able], [one.reward for one in unable]

    able, unable = asyncio.run(play())
    assert np.mean(np.equal(able, 1.0)) > 0.75
    assert np.mean(np.equal(unable, 1.0)) < 0.1


def test_demonstrations_become_batches(config: Config, kit: EnvironmentKit) -> None:
    encoder = load_encoder(policy_path(TINY))
    script = Script(kit, encoder, config, batch=4, mistakes=0.0, seed=0)
    for one in asyncio.run(script.batch()):
        ends = [place for place, token in enumerate(one.ids) if token == encoder.renderer.stop_ids[0]]
        assert ends[-1] == len(one.ids) - 1
        assert 2 <= len(ends) <= 3  # searches and the answer
        assert all(one.said[place] for place in ends)
    assert script.played.demonstrations == 4
    assert script.played.tokens > script.played.said_tokens > 0
