"""Both ends of publication as a configuration puts them together, over real files and real sockets."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.publication.version_kit import listing, publish, weights_bytes
from trace_async.app.publication import canary_prompts, open_publisher, open_stager, server_address
from trace_async.app.wiring import build_kit, policy_path
from trace_async.config import Config, CoordinatorConfig, PublicationConfig
from trace_async.errors import PolicyError
from trace_async.rendering import load_renderer
from trace_async.run_folder import RunFolder


@pytest.mark.parametrize(
    ("coordinator", "publication", "listens"),
    [
        ("tcp://127.0.0.1:0", "", "tcp://127.0.0.1:0"),
        ("tcp://10.0.0.7:5555", "", "tcp://10.0.0.7:0"),
        ("tcp://[2001:db8::7]:5555", "", "tcp://[2001:db8::7]:0"),
        ("ipc:///tmp/road", "", "tcp://127.0.0.1:0"),
        ("tcp://10.0.0.7:5555", "tcp://10.1.0.7:77", "tcp://10.1.0.7:77"),
        ("tcp://10.0.0.7:5555", "none", None),
    ],
)
def test_the_weight_server_listens_beside_the_coordinator_unless_told_otherwise(
    coordinator: str, publication: str, listens: str | None
) -> None:
    config = Config(
        coordinator=CoordinatorConfig(address=coordinator), publication=PublicationConfig(address=publication)
    )
    assert server_address(config) == listens


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return RunFolder(tmp_path / "run")


def test_an_actor_gets_the_files_where_it_sees_them_and_the_stream_where_it_does_not(folder: RunFolder) -> None:
    config = Config()
    with open_publisher(config, folder) as (store, server), open_stager(config, "a", dialled="tcp://h:9") as stager:
        assert server is not None
        for version, directory in ((1, None), (2, "/nowhere")):
            notice = publish(store, version, floats=2_000_000).notice
            assert notice.address == server.address
            weights = asyncio.run(stager.fetch(replace(notice, directory=directory or notice.directory))).weights
            assert weights.read_bytes() == weights_bytes(version, floats=2_000_000)
            assert (server.counters()["stream_bytes"] > 8_000_000) == (directory is not None)
    assert listing(folder.versions) == sorted(
        f"e001_v00000{version}.{kind}"
        for version in (1, 2)
        for kind in ("manifest.json", "predictor.json", "safetensors")
    )


def test_without_a_server_an_actor_elsewhere_is_told_both_ways(folder: RunFolder) -> None:
    config = Config(publication=PublicationConfig(address="none"))
    with open_publisher(config, folder) as (store, server), open_stager(config, "a", dialled="tcp://h:9") as stager:
        assert server is None
        notice = replace(publish(store, 1).notice, directory="/nowhere")
        with pytest.raises(PolicyError, match=r"From files: cannot read /nowhere/.* From the weight server: none runs"):
            asyncio.run(stager.fetch(notice))


def test_a_folder_that_may_be_in_memory_is_left_empty_by_an_orderly_end_and_by_no_other(folder: RunFolder) -> None:
    elsewhere = folder.root / "elsewhere"
    config = Config(publication=PublicationConfig(directory=str(elsewhere)))

    def fail() -> None:
        with open_publisher(config, folder) as (store, _):
            publish(store, 1)
            raise RuntimeError("the learner died")

    with pytest.raises(RuntimeError):
        fail()
    assert len(listing(elsewhere)) == 3
    with open_publisher(config, folder) as (store, _):
        publish(store, 2)
    assert listing(elsewhere) == []
    assert not folder.versions.exists()


def test_a_named_folder_is_staged_in_by_links_so_that_nothing_is_copied(folder: RunFolder) -> None:
    config = Config(publication=PublicationConfig(directory=str(folder.root / "elsewhere")))
    with open_publisher(config, folder) as (store, _), open_stager(config, "a", dialled="") as stager:
        notice = publish(store, 1).notice
        staged = asyncio.run(stager.fetch(notice)).weights
        assert staged.is_relative_to(folder.root / "elsewhere")
        assert staged.stat().st_nlink == 2


def test_canary_prompts_that_begin_alike_are_cut_to_the_context_and_told_once() -> None:
    from transformers import AutoConfig

    path = policy_path("builtin:frozenlake-tiny")
    model_config = AutoConfig.from_pretrained(path)
    prompts = canary_prompts(build_kit(Config()), load_renderer(path), model_config, max_context_tokens=3)
    assert {len(prompt) for prompt in prompts} == {2}
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(("known", "number"), [(True, 4), (False, 1)])
def test_canary_prompts_open_heldout_tasks_where_that_is_known_and_are_a_fixed_row_elsewhere(
    known: bool, number: int
) -> None:
    from transformers import AutoConfig

    path = policy_path("builtin:frozenlake-tiny")
    kit = build_kit(Config())
    if not known:
        kit = kit._replace(opening=None)
    model_config = AutoConfig.from_pretrained(path)
    prompts = canary_prompts(kit, load_renderer(path), model_config, max_context_tokens=64)
    assert len(prompts) == number
    assert all(2 <= len(prompt) <= 63 and prompt.dtype == "int32" for prompt in prompts)
    assert max(int(prompt.max()) for prompt in prompts) < model_config.vocab_size
