"""A world folder holds exactly the world, or is not there; what is wrong in one is named by file, line and field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.multihop_qa.world import World, make_world, new_world_options, read_world, write_world
from tests.envs.multihop_qa.worlds import tiny
from trace_async.errors import ConfigError


def world() -> World:
    return tiny(questions=60, pages=300, heldout_share=0.25)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds") / "deep" / "world"
    write_world(world(), folder, new_world=make_world(new_world_options(world().options)))
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def test_what_is_written_is_read(written: Path) -> None:
    assert read_world(written) == world()
    assert read_world(written, new_world=True) == make_world(new_world_options(world().options))


def test_equal_worlds_are_equal_bytes(written: Path, tmp_path: Path) -> None:
    write_world(world(), tmp_path / "again", new_world=read_world(written, new_world=True))
    names = sorted(path.name for path in written.iterdir())
    assert names == [
        "corpus.jsonl", "heldout.jsonl", "new_world.jsonl", "new_world_corpus.jsonl", "train.jsonl", "world.json",
    ]  # fmt: skip
    assert all((written / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_the_corpus_is_in_the_lines_of_flashrag(written: Path) -> None:
    first = json.loads((written / "corpus.jsonl").read_text().splitlines()[0])
    page = world().pages[0]
    assert first == {"id": page.doc_id, "contents": f'"{page.title}"\n{page.text}'}


def test_every_question_says_which_world_it_is_of(written: Path) -> None:
    lines = [json.loads(line) for line in (written / "heldout.jsonl").read_text().splitlines()]
    assert {line["world"] for line in lines} == {world().digest}
    assert {line["split"] for line in lines} == {"heldout"}


def test_world_json_tells_the_options_and_the_numbers(written: Path) -> None:
    about = json.loads((written / "world.json").read_text())["world"]
    assert about["digest"] == world().digest
    assert about["pages"] == 300
    assert about["splits"]["train"] == {
        "questions": 45, "kinds": {"chain": 45}, "hops": {"1": 12, "2": 11, "3": 11, "4": 11},
    }  # fmt: skip


def test_without_a_new_world_there_is_none_to_read(tmp_path: Path) -> None:
    write_world(world(), tmp_path / "alone", new_world=None)
    assert read_world(tmp_path / "alone") == world()
    with pytest.raises(ConfigError, match=r"world\.json: field 'new_world' is missing"):
        read_world(tmp_path / "alone", new_world=True)


def test_a_folder_in_use_is_left_alone_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    used, empty = tmp_path / "used", tmp_path / "empty"
    used.mkdir()
    empty.mkdir()
    (used / "mine").write_text("x")
    with pytest.raises(ConfigError, match="used exists and is not an empty folder"):
        write_world(world(), used, new_world=None)
    assert [path.name for path in used.iterdir()] == ["mine"]
    write_world(world(), empty, new_world=None)
    assert read_world(empty) == world()


def test_a_write_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    (last, *others) = reversed(world().questions["heldout"])
    broken = replace(last, level=object())  # type: ignore[arg-type]  # JSON cannot say it: writing ends there
    questions = {**world().questions, "heldout": (*reversed(others), broken)}
    with pytest.raises(TypeError, match="object"):
        write_world(replace(world(), questions=questions), tmp_path / "half", new_world=None)
    assert list(tmp_path.iterdir()) == []


def change_line(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = path.read_text().splitlines()
    line = json.loads(lines[number - 1])
    change(line)
    lines[number - 1] = json.dumps(line)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "number", "change", "message"),
    [
        ("corpus.jsonl", 2, {"id": 7}, "corpus.jsonl: line 2: field 'id': expected a text, got 7"),
        ("corpus.jsonl", 3, {"contents": "Kado\nno quotes"}, "line 3: field 'contents': the first line must be"),
        ("train.jsonl", 1, {"hops": "2"}, "train.jsonl: line 1: field 'hops': expected an int, got '2'"),
        ("train.jsonl", 4, {"hops": True}, "line 4: field 'hops': expected an int, got True"),
        ("train.jsonl", 2, {"answers": "Kado"}, r"line 2: field 'answers': expected a list of texts, got 'Kado'"),
        ("train.jsonl", 2, {"steps": [["a", "b"]]}, r"'steps': expected a list of \[text, text, text, text\]"),
        ("train.jsonl", 2, {"supporting_facts": [["a", "0"]]}, r"expected a list of \[text, number\]"),
        ("train.jsonl", 2, {"colour": "red"}, "line 2: field 'colour' is unknown"),
        ("heldout.jsonl", 5, {"split": "dev"}, "heldout.jsonl: line 5: field 'split': expected train or heldout"),
        ("heldout.jsonl", 5, {"world": "0" * 64}, "line 5: field 'world': the question is of world 000000000000"),
        ("train.jsonl", 3, {"question": "Who?"}, "pages and questions have digest"),
        ("corpus.jsonl", 3, {"contents": '"Kado"\nchanged'}, "pages and questions have digest"),
    ],
)
def test_a_changed_line_is_named(copy: Path, name: str, number: int, change: dict[str, Any], message: str) -> None:
    change_line(copy / name, number, lambda line: line.update(change))
    with pytest.raises(ConfigError, match=message):
        read_world(copy)


def test_a_missing_field_is_named(copy: Path) -> None:
    change_line(copy / "train.jsonl", 6, lambda line: line.pop("gold_ids"))
    with pytest.raises(ConfigError, match=r"train\.jsonl: line 6: field 'gold_ids' is missing"):
        read_world(copy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], r"line \d+: not JSON"),
        (lambda text: "[]\n" + text, "line 1: expected an object, got list"),
        (lambda text: "é" + text, "not ASCII"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-1]), "pages and questions have digest"),
    ],
)
def test_a_damaged_file_is_named(copy: Path, damage: Callable[[str], str], message: str) -> None:
    path = copy / "train.jsonl"
    path.write_text(damage(path.read_text()), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_world(copy)


@pytest.mark.parametrize("name", ["world.json", "corpus.jsonl", "train.jsonl", "heldout.jsonl"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        read_world(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(format=9), "field 'format': expected 1"),
        (lambda about: about["world"].pop("digest"), "field 'world': expected options .* and digest"),
        (lambda about: about["world"]["options"].pop("hops"), "field 'world.options': hops missing"),
        (lambda about: about["world"]["options"].update(page=3), "world.options.page: a world has no such option"),
        (lambda about: about["world"]["options"].update(pages="many"), "world.options.pages: expected int"),
    ],
)
def test_a_damaged_world_json_is_named(copy: Path, change: Callable[[Any], object], message: str) -> None:
    change_line(copy / "world.json", 1, change)
    with pytest.raises(ConfigError, match=message):
        read_world(copy)
