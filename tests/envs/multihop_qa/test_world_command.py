"""What `trace-async make-world` does: settings in, a folder out."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.multihop_qa.world import WorldOptions, read_world
from trace_async.app.make_world import describe, make_world_folder, world_options
from trace_async.errors import ConfigError

SETTINGS = ["pages=300", "questions=60", 'kinds=["chain"]', "hops=[1, 2]", "style=plain", "heldout_share=0.25"]


def test_settings_are_toml_or_bare_texts_and_the_last_one_wins() -> None:
    assert world_options([*SETTINGS, "pages = 400"]) == WorldOptions(
        pages=400, questions=60, kinds=("chain",), hops=(1, 2), style="plain", heldout_share=0.25
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pages", "--set pages: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("page=300", "world.page: a world has no such option; did you mean 'pages'"),
        ("pages=many", "world.pages: expected int, got 'many'"),
        ("kinds=chain", "world.kinds: expected a list of str, got 'chain'"),
        ("style=verse", "world.style: need one of"),
    ],
)
def test_settings_that_are_none_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world_options([setting])


def test_it_writes_both_worlds_and_tells_each_stage(tmp_path: Path) -> None:
    said: list[str] = []
    world = make_world_folder(tmp_path / "world", SETTINGS, with_new_world=True, say=said.append)
    assert said == ["making the world", "making the new world", f"writing {tmp_path / 'world'}"]
    assert read_world(tmp_path / "world") == world
    assert read_world(tmp_path / "world", new_world=True).options.name_family == 1
    assert describe(world) == {
        "digest": world.digest, "pages": "300", "train questions": "45", "heldout questions": "15",
    }  # fmt: skip


def test_it_can_leave_the_new_world_out(tmp_path: Path) -> None:
    make_world_folder(tmp_path / "world", SETTINGS, with_new_world=False, say=lambda _: None)
    assert not list((tmp_path / "world").glob("new_world*"))


def test_a_folder_in_use_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    said: list[str] = []
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        make_world_folder(tmp_path, SETTINGS, with_new_world=False, say=said.append)
    assert said == []
