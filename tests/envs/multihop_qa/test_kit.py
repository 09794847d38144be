"""The kit: what options stand for, what they refuse, what is read when; that questions need several searches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.multihop_qa.oracle import names_in
from envs.multihop_qa.sources import dataset_of
from envs.multihop_qa.world import WorldOptions, make_world, new_world_options, write_world
from envs.options import read_options
from envs.registry import load_environment
from tests.envs.multihop_qa.samples import FLASHRAG, MUSIQUE, write_lines
from tests.envs.multihop_qa.small_world import OPTIONS, WORLD, make_kit, small_kit
from trace_async.core.types import Message, Task
from trace_async.environment import EnvironmentKit, StepResult
from trace_async.errors import ConfigError

FILES: dict[str, Any] = {"train": ["t.jsonl"], "heldout": ["h.jsonl"], "corpus": ["questions"]}
FTS5 = {"retriever": {"kind": "fts5"}}


def play(kit: EnvironmentKit, task: Task, turns: Sequence[str]) -> list[StepResult]:
    async def episode() -> list[StepResult]:
        environment = kit.make_environment()
        await environment.reset(task, seed=0)
        return [await environment.step(turn) for turn in turns]

    return asyncio.run(episode())


def musique(number: int, question: str) -> dict[str, Any]:
    return {**MUSIQUE, "id": f"2hop__{number}", "question": question}


def reply(result: StepResult) -> str:
    return "".join(message.content for message in result.messages)


def test_question_files_bring_tasks_labels_and_the_paragraphs_that_are_searched(tmp_path: Path) -> None:
    write_lines(tmp_path / "t.jsonl", [musique(1, "Who leads it?")])
    write_lines(tmp_path / "h.jsonl", [musique(2, "Who led it?"), musique(3, "Who will lead it?")])
    (tmp_path / "nq").mkdir()
    write_lines(tmp_path / "nq" / "dev.jsonl", [FLASHRAG])
    write_lines(tmp_path / "more.jsonl", [{"title": "Extra", "text": "Zebra ."}])
    options = {
        **{
            "data": str(tmp_path),
            "train": ["t.jsonl"],
            "heldout": ["musique:h.jsonl"],
            "sets": {"nq": ["nq/dev.jsonl"]},
        },
        **{"corpus": ["questions", "more.jsonl"], "tags": {"style": "words"}, "top_k": 1, **FTS5},
    }
    kit = load_environment("multihop_qa", options)
    assert [kit.tasks.size(split) for split in ("train", "heldout", "nq")] == [1, 2, 1]
    task = kit.tasks.task("heldout", 1)
    assert task.task_id == "musique/heldout/2hop__3"
    assert kit.labels is not None
    assert kit.labels(task) == {"dataset": "musique", "hops": "2", "kind": "2hop"}
    assert kit.labels(kit.tasks.task("nq", 0)) == {"dataset": "nq", "kind": "x"}
    assert kit.opening is not None
    assert kit.opening(task) == (Message("user", "Who will lead it?"),)
    assert [reply(result) for result in play(kit, task, ["search z", "search zebra"])] == [
        "Z : About Z.",
        "Extra : Zebra .",
    ]
    with pytest.raises(ConfigError, match="unknown split 'test': there are train, heldout, nq"):
        kit.tasks.size("test")


def test_the_questions_of_several_files_take_turns(tmp_path: Path) -> None:
    write_lines(tmp_path / "t.jsonl", [musique(1, "Who?")])
    write_lines(tmp_path / "a.jsonl", [musique(number, f"Who is {number}?") for number in (2, 3, 4)])
    write_lines(tmp_path / "b.jsonl", [musique(number, f"Who is {number}?") for number in (5,)])
    options = {**FILES, "data": str(tmp_path), "heldout": ["a.jsonl", "b.jsonl"], **FTS5}
    tasks = load_environment("multihop_qa", options).tasks
    assert [tasks.task("heldout", index).data["question_id"][-1] for index in range(4)] == ["2", "5", "3", "4"]


def test_an_index_can_be_made_before_the_first_episode(tmp_path: Path) -> None:
    for name, number in (("t", 1), ("h", 2)):
        write_lines(tmp_path / f"{name}.jsonl", [musique(number, f"Who is {number}?")])
    kit = load_environment("multihop_qa", {**FILES, "data": str(tmp_path), "tags": {"style": "words"}, **FTS5})

    async def prepare(split: str) -> None:
        assert kit.prepare is not None
        await kit.prepare(split)

    asyncio.run(prepare("train"))
    task = kit.tasks.task("train", 0)
    for path in tmp_path.iterdir():
        path.unlink()  # whatever is read from here on is missing
    assert reply(play(kit, task, ["search z"])[0])
    with pytest.raises(ConfigError, match="unknown split 'test'"):
        asyncio.run(prepare("test"))


def test_no_file_is_read_before_it_is_needed(tmp_path: Path) -> None:
    kit = load_environment("multihop_qa", {"data": str(tmp_path), **FILES, "corpus": ["corpus.jsonl"], **FTS5})
    task = Task("x", {"question_id": "1", "question": "Who", "answers": ["A"], "collection": "main"})
    assert kit.opening is not None
    assert kit.opening(task)[0].content.endswith("Question: Who?")
    turn = "<think>t</think><answer>A</answer>"
    assert play(kit, task, [turn])[0].reward == 1.0
    with pytest.raises(ConfigError, match=r"t\.jsonl: no such file; .* environment\.options\.data, which is"):
        kit.tasks.size("train")
    write_lines(tmp_path / "t.jsonl", [musique(1, "Who leads it?")])
    write_lines(tmp_path / "h.jsonl", [musique(2, "Who led it?")])
    assert kit.tasks.size("train") == 1  # the corpus is still not there
    with pytest.raises(ConfigError, match=r"corpus\.jsonl"):
        play(kit, task, ["<search>x</search>"])


def test_files_of_a_layout_without_data_set_names_are_named_after_themselves(tmp_path: Path) -> None:
    for folder in ("nq", "hotpotqa"):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / "train.jsonl", [{**FLASHRAG, "question": f"who in {folder}"}])
    write_lines(tmp_path / "h.jsonl", [musique(2, "Who led it?")])
    train = ["nq/train.jsonl", "flashrag:hotpotqa/train.jsonl"]
    kit = load_environment("multihop_qa", {"data": str(tmp_path), **FILES, "train": train})
    tasks = [kit.tasks.task("train", index) for index in range(2)]
    assert [task.task_id for task in tasks] == ["nq/train/test_0", "hotpotqa/train/test_0"]  # equal ids, kept apart
    assert dataset_of(Path("x/popqa_test_100.jsonl.gz")) == "popqa_test_100"
    assert dataset_of(Path("/test.jsonl")) == "test"


def test_a_world_has_three_splits_and_the_new_one_searches_its_own_pages() -> None:
    kit = small_kit()
    assert kit.tasks.size("train") == 120
    assert kit.tasks.size("heldout") == kit.tasks.size("new_world") == 30
    world = make_world(read_options(WorldOptions, WORLD, owner="test"))
    new = make_world(new_world_options(world.options))
    assert {kit.tasks.task("new_world", index).data["question"] for index in range(30)} == {
        question.question for question in new.questions["heldout"]
    }
    for split, own, foreign in (("heldout", world, new), ("new_world", new, world)):
        task = kit.tasks.task(split, 0)
        (result,) = play(kit, task, [f"search {own.pages[7].title}"])
        assert reply(result) == f"{own.pages[7].title} : {own.pages[7].text}"
        (result,) = play(kit, task, [f"search {foreign.pages[7].title}"])
        assert foreign.pages[7].title not in reply(result)


def test_a_world_folder_gives_the_tasks_and_pages_of_the_world_it_was_written_from(tmp_path: Path) -> None:
    world = make_world(read_options(WorldOptions, WORLD, owner="test"))
    write_world(world, tmp_path / "world", new_world=make_world(new_world_options(world.options)))
    options = {name: value for name, value in OPTIONS.items() if name != "world"}
    folder = load_environment("multihop_qa", {**options, "data": str(tmp_path), "world_folder": "world"})
    for split in ("train", "heldout", "new_world"):
        assert folder.tasks.size(split) == small_kit().tasks.size(split)
        for index in (0, 7, 29):
            task = folder.tasks.task(split, index)
            assert task == small_kit().tasks.task(split, index)
            turns = [f"search {task.data['gold_titles'][0]}"]
            assert str(play(folder, task, turns)) == str(play(small_kit(), task, turns))


def test_corpus_files_lie_beside_the_pages_of_both_worlds(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "more.jsonl", [{"title": "Extra", "text": "Zebra ."}])
    kit = make_kit(corpus=[str(path)])
    for split in ("train", "new_world"):
        assert reply(play(kit, kit.tasks.task(split, 0), ["search zebra"])[0]) == "Extra : Zebra ."


def test_an_index_file_is_not_shared_by_two_collections(tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    kit = make_kit(retriever={"kind": "fts5", "path": path})
    for split in ("train", "new_world"):
        title = kit.tasks.task(split, 0).data["gold_titles"][0]
        assert reply(play(kit, kit.tasks.task(split, 0), [f"search {title}"])[0]).startswith(f"{title} : ")
    assert {file.name for file in tmp_path.iterdir()} >= {"index", "index.new_world"}


def test_a_bound_kit_counts_what_it_shows_with_the_tokenizer() -> None:
    kit = make_kit(observation_tokens=20)
    assert kit.bind is not None
    bound = kit.bind(lambda text, count: text[:count])
    assert bound.tasks is kit.tasks
    task = kit.tasks.task("train", 0)
    title = task.data["gold_titles"][0]
    (plain,), (cut,) = (play(one, task, [f"search {title}"]) for one in (kit, bound))
    assert len(reply(plain).split()) == 20
    assert len(reply(cut)) == 20
    assert reply(plain).startswith(reply(cut))
    assert bound.bind is not None
    assert bound.opening is not None

    async def close_twice() -> None:
        assert bound.close is not None
        await bound.close()
        await bound.close()

    asyncio.run(close_twice())


def test_questions_of_several_hops_need_several_searches() -> None:
    """A player that gives what it knows from training or from the question, and the best player that searches once."""
    kit, rng = small_kit(), np.random.default_rng(0)
    known = [kit.tasks.task("train", index).data["answers"][0] for index in range(120)]
    tasks = [kit.tasks.task(split, index) for split in ("heldout", "new_world") for index in range(30)]
    tasks = [task for task in tasks if task.data["hops"] >= 2 and task.data["kind"] != "count"]
    assert len(tasks) >= 25
    closed_book = one_search = 0.0
    for task in tasks:
        guesses = [*names_in(task.data["question"]), *known]
        (told,) = play(kit, task, [f"answer {guesses[int(rng.integers(len(guesses)))]}"])
        closed_book += told.reward
        (shown,) = play(kit, task, [f"search {task.data['question']}"])
        one_search += f" {task.data['answers'][0]} " in f" {reply(shown)} ".replace(".", " ").replace(",", " ")
    assert closed_book <= 0.05 * len(tasks)
    assert one_search <= 0.05 * len(tasks)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "exactly one of the three must be given, not 0"),
        ({"world": {}, "world_folder": "w"}, "exactly one of the three must be given, not 2"),
        ({"world": {}, "train": ["a"]}, "exactly one of the three must be given, not 2"),
        ({"train": ["a"]}, r"options\.heldout: give at least one question file"),
        ({"heldout": ["a"]}, r"options\.train: give at least one question file"),
        ({"train": ["a"], "heldout": ["b"]}, r'options\.corpus: nothing to search; give files, or "questions"'),
        ({**FILES, "train": ["hotpot:a"]}, "'hotpot' is no format of questions"),
        ({**FILES, "sets": {"new_world": ["a"]}}, r"options\.sets\.new_world: this name is taken"),
        ({**FILES, "sets": {"dev": []}}, r"options\.sets\.dev: give at least one question file"),
        ({**FILES, "aliases": "a"}, r'options\.aliases: they go with question files written as "2wiki:PATH"'),
        ({**FILES, "reward": "acc"}, r"options\.reward: need one of em, f1, .*, staged, got 'acc'"),
        ({**FILES, "reward_options": {"retrieval": 0.3}}, r"reward_options: reward 'em' does not read them"),
        ({**FILES, "process_score": "em"}, r"options\.process_score: need one of none, gold_page, .*, got 'em'"),
        ({**FILES, "top_k": 0}, r"options\.top_k: need >= 1, got 0"),
        ({**FILES, "max_turns": 0}, r"options\.max_turns: need >= 1, got 0"),
        ({**FILES, "observation_tokens": 0}, r"options\.observation_tokens: need >= 1"),
        ({**FILES, "passage_tokens": -1}, r"options\.passage_tokens: need >= 0"),
        ({**FILES, "ask_rate": 1.5}, r"options\.ask_rate: need 0 <= rate <= 1, got 1.5"),
        ({**FILES, "tags": {"styl": "words"}}, r"options\.tags\.styl: .* did you mean 'style'"),
        ({**FILES, "retriever": {"kind": "google"}}, r"options\.retriever\.kind: need one of"),
        ({"world": {"page": 3}}, r"options\.world\.page: .* did you mean 'pages'"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_the_cure(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment("multihop_qa", options)


def test_a_remote_retriever_needs_no_corpus() -> None:
    retriever = {"kind": "http", "url": "http://127.0.0.1:9/retrieve"}
    kit = load_environment("multihop_qa", {"train": ["a"], "heldout": ["b"], "retriever": retriever})
    assert kit.make_environment().name == "multihop_qa"
