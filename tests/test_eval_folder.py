"""The folder of an evaluation: goes on where it was, whatever was torn; refuses what would not be comparable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.eval_kit import evaluate, make_episode, make_plan
from tests.fakes import ScriptedEngine, World, now_and_then
from trace_async.app.eval_command import Session, evaluation, open_session
from trace_async.app.eval_folder import EvalFolder, open_log
from trace_async.app.eval_plan import Plan, Request, settings_of
from trace_async.app.eval_records import Row
from trace_async.app.eval_summary import summarize_mode
from trace_async.app.eval_text import summary_json
from trace_async.config import EngineConfig, EnvironmentConfig, TreeConfig
from trace_async.core.types import Task
from trace_async.errors import EngineError, EnvironmentFailure, UserError


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(tmp_path / "policy")


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers(session: Session) -> dict[str, Any]:
    """The summary without NaN, so that two can be compared."""
    return summary_json({mode: summarize_mode(session.rows(mode)) for mode in session.plan.modes})


def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records by task, without what the clock said."""
    for record in found:
        record["wall_s"] = 0.0
        for turn in record["turns"]:
            turn["generate_s"] = turn["environment_s"] = 0.0
    return sorted(found, key=lambda record: (record["mode"], record["index"]))


# ---- what is written -----------------------------------------------------------------------------------------------


def test_a_line_has_everything_that_was_said_and_measured(plan: Plan, tmp_path: Path) -> None:
    evaluate(tmp_path / "out", plan)
    found = records(tmp_path / "out")
    assert sorted(record["index"] for record in found) == list(range(6))
    for record in found:
        assert record["mode"] == "sampled"
        assert record["task_id"] == f"quiz/dev/{record['index']}"
        assert record["task"]["answers"] == ["heads", "Kopf"]
        assert record["labels"] == {"hops": str(2 + record["index"] % 3)}
        assert record["failure"] is None
        assert record["seed"] == 3
        assert record["versions"] == [0, 0]
        assert record["wall_s"] > 0
        assert record["opening"] == [{"role": "user", "text": f"toss {record['task_id']} please"}]
        turns = record["turns"]
        assert len(turns) == record["num_turns"] == record["metrics"]["searches"]
        assert record["sampled_tokens"] == sum(turn["tokens"] for turn in turns)
        assert record["context_tokens"] == record["prompt_tokens"] + sum(
            turn["tokens"] + turn["reply_tokens"] for turn in turns
        )
        assert record["outcome"] == sum(turn["reward"] for turn in turns)
        for turn in turns[:-1]:
            assert turn["reply"][0]["role"] == "user"
            assert turn["reply"][0]["text"].startswith("coin ")
        assert record["end"] == ("terminated" if record["num_turns"] < 6 or not turns[-1]["reply"] else "turn_limit")


def test_an_episode_that_the_player_ends_has_the_metrics_of_its_last_reply(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "policy", world=World(end_probability=0.0), num=2)
    session = evaluate(tmp_path / "out", plan)
    for record in records(tmp_path / "out"):
        assert (record["end"], record["metrics"]) == ("turn_limit", {"em": 0.0, "searches": 6.0})
    assert [row.num_turns for row in session.rows("sampled")] == [6, 6]


def test_words_that_utf_8_cannot_say_and_numbers_that_json_cannot_say_survive(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "out")
    said = 'lone \ud800, line separator \u2028, null \0, "quotes"\n'
    with open_log(folder, {}, fixed=()) as log:
        log.add(make_episode(said=said, metrics={"f1": float("nan"), "em": 1.0}), mode="greedy", labels={}, seed=0)
    [(place, size, record)] = folder.records()
    assert (place, size) == (0, folder.episodes.stat().st_size)
    assert record["turns"][1]["text"] == said
    assert record["metrics"] == {"f1": None, "em": 1.0}
    assert folder.read_at(0) == record


# ---- going on ------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_is_finished_plays_nothing_again(plan: Plan, tmp_path: Path) -> None:
    first = evaluate(tmp_path / "out", plan)
    content = (tmp_path / "out" / "episodes.jsonl").read_bytes()
    engine = ScriptedEngine()
    second = evaluate(tmp_path / "out", plan, engine=engine)
    assert not engine.requests
    assert (tmp_path / "out" / "episodes.jsonl").read_bytes() == content
    assert numbers(first) == numbers(second)


def test_a_file_torn_at_any_byte_of_its_last_line_goes_on_to_the_same_end(plan: Plan, tmp_path: Path) -> None:
    whole = evaluate(tmp_path / "whole", plan, max_parallel=1)
    content = (tmp_path / "whole" / "episodes.jsonl").read_bytes()
    wanted = timeless(records(tmp_path / "whole"))
    last = content[:-1].rfind(b"\n") + 1
    out = tmp_path / "torn"
    out.mkdir()
    settings = json.loads((tmp_path / "whole" / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps(settings))
    before = {key: row for key, row in whole.log.rows.items() if row.task_index < 5}
    for end in range(last, len(content)):
        (out / "episodes.jsonl").write_bytes(content[:end])
        with open_log(EvalFolder(out), settings, fixed=()) as log:
            assert log.rows == before
        assert (out / "episodes.jsonl").read_bytes() == content[:last]
        if end % 61 == 0 or end in (last, len(content) - 1):
            (out / "episodes.jsonl").write_bytes(content[:end])
            engine = ScriptedEngine()
            assert evaluate(out, plan, engine=engine).log.rows == whole.log.rows
            assert {request.request_id.rpartition("-")[0] for request in engine.requests} == {"eval-quiz/dev/5"}
            assert timeless(records(out)) == wanted


@pytest.mark.parametrize("limit_s", [0.05, 0.15, 0.35, 0.55, 0.85, 1.25])
def test_an_interrupted_evaluation_that_goes_on_gives_the_numbers_of_one_that_was_not(
    limit_s: float, tmp_path: Path
) -> None:
    plan = make_plan(tmp_path / "policy", num=9, modes=("sampled", "greedy"))
    whole = evaluate(tmp_path / "whole", plan)
    stopped = evaluate(tmp_path / "out", plan, limit_s=limit_s)
    assert len(stopped.log.rows) < 18
    session = evaluate(tmp_path / "out", plan, max_parallel=5)
    assert numbers(session) == numbers(whole)
    assert timeless(records(tmp_path / "out")) == timeless(records(tmp_path / "whole"))


def test_a_process_that_is_killed_leaves_whole_lines_behind(plan: Plan, tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from tests.eval_kit import make_episode
from trace_async.app.eval_folder import EvalFolder, open_log
with open_log(EvalFolder(Path({str(tmp_path / "out")!r})), {{}}, fixed=()) as log:
    for index in range(3):
        log.add(make_episode(index), mode="sampled", labels={{}}, seed=0)
    os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent, check=False)
    assert ended.returncode == -9
    assert [record["index"] for _, _, record in EvalFolder(tmp_path / "out").records()] == [0, 1, 2]


def test_failed_tasks_are_written_count_nowhere_and_are_tried_again(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "policy", num=20)
    fault = now_and_then(1, [lambda: EngineError("boom")], probability=0.2)
    broken = evaluate(tmp_path / "out", plan, engine=ScriptedEngine(fault=fault))
    failed = [row.task_index for row in broken.rows("sampled") if row.failed]
    assert 0 < len(failed) < 20
    lines = [record for record in records(tmp_path / "out") if record["failure"]]
    assert sorted(record["index"] for record in lines) == sorted(failed)
    assert all((record["failure"], record["end"]) == ("EngineError: boom", "failed") for record in lines)
    assert all((record["outcome"], record["turns"]) == (None, []) for record in lines)
    part = summarize_mode(broken.rows("sampled")).overall
    assert (part.num_played, part.num_failed) == (20 - len(failed), len(failed))
    assert part.measures["success"].num == 20 - len(failed)

    mended = evaluate(tmp_path / "out", plan)
    assert not any(row.failed for row in mended.rows("sampled"))
    assert numbers(mended) == numbers(evaluate(tmp_path / "whole", plan))
    assert len(records(tmp_path / "out")) == 20 + len(failed)


def test_an_evaluation_of_which_nothing_could_be_played_fails(tmp_path: Path) -> None:
    world = World(fault=lambda call: OSError("no sandbox") if call == "reset:" else None)
    plan = make_plan(tmp_path / "policy", world=world)
    with pytest.raises(EnvironmentFailure, match="none of 6 dev tasks could be played"):
        evaluate(tmp_path / "out", plan)
    assert len(records(tmp_path / "out")) == 6


def test_more_tasks_go_on_with_what_there_is_and_fewer_count_fewer(tmp_path: Path) -> None:
    evaluate(tmp_path / "out", make_plan(tmp_path / "policy", num=4))
    engine = ScriptedEngine()
    more = evaluate(tmp_path / "out", make_plan(tmp_path / "policy", num=7), engine=engine)
    assert {request.request_id.rpartition("-")[0] for request in engine.requests} == {
        f"eval-quiz/dev/{index}" for index in (4, 5, 6)
    }
    assert numbers(more) == numbers(evaluate(tmp_path / "whole", make_plan(tmp_path / "policy", num=7)))
    fewer = evaluate(tmp_path / "out", make_plan(tmp_path / "policy", num=2))
    assert len(fewer.rows("sampled")) == 2


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda plan: replace(plan, split="test"), 'split: "dev" there, "test" now'),
        (lambda plan: replace(plan, seed=4), "seed: 3 there, 4 now"),
        (lambda plan: replace(plan, modes=("greedy",)), 'modes: ["sampled"] there, ["greedy"] now'),
        (
            lambda plan: replace(plan, config=replace(plan.config, engine=EngineConfig(temperature=0.5))),
            "engine.temperature: 1.0 there, 0.5 now",
        ),
        (
            lambda plan: replace(plan, config=replace(plan.config, tree=TreeConfig(max_turns=3))),
            "limits.max_turns: 64 there, 3 now",
        ),
        (
            lambda plan: replace(
                plan, config=replace(plan.config, environment=EnvironmentConfig(options={"retriever": {"k": 3}}))
            ),
            'environment.options.retriever: (absent) there, {"k": 3} now',
        ),
    ],
)
def test_a_folder_of_other_settings_is_refused_with_what_differs_and_the_cure(
    change: Callable[[Plan], Plan], complaint: str, plan: Plan, tmp_path: Path
) -> None:
    evaluate(tmp_path / "out", plan)
    before = (tmp_path / "out" / "settings.json").read_bytes()
    with pytest.raises(UserError) as caught:
        evaluate(tmp_path / "out", change(plan))
    assert complaint in str(caught.value)
    assert "choose another --out" in str(caught.value)
    assert (tmp_path / "out" / "settings.json").read_bytes() == before


def test_settings_that_change_no_episode_may_change(plan: Plan, tmp_path: Path) -> None:
    evaluate(tmp_path / "out", plan)
    faster = replace(plan.config, engine=EngineConfig(max_batch=3, threads=2, request_deadline_s=9.0))
    engine = ScriptedEngine()
    evaluate(tmp_path / "out", replace(plan, config=faster), engine=engine)
    assert not engine.requests


def test_another_threshold_of_success_counts_the_same_episodes_anew(plan: Plan, tmp_path: Path) -> None:
    half = evaluate(tmp_path / "out", plan)
    outcomes = [row.outcome for row in half.rows("sampled")]
    assert set(outcomes) == {0.0, 1.0}
    assert evaluation(half, "sampled").success == sum(outcomes) / len(outcomes)
    for above, success in ((-0.5, 1.0), (1.0, 0.0)):
        config = replace(plan.config, environment=replace(plan.config.environment, success_above=above))
        engine = ScriptedEngine()
        session = evaluate(tmp_path / "out", replace(plan, config=config), engine=engine)
        assert not engine.requests
        assert evaluation(session, "sampled").success == success
        assert json.loads((tmp_path / "out" / "settings.json").read_text())["success_above"] == above


def test_another_policy_in_the_same_place_is_another_policy(plan: Plan, tmp_path: Path) -> None:
    evaluate(tmp_path / "out", plan)
    (plan.policy / "notes.md").write_text("not a part of it")
    evaluate(tmp_path / "out", plan)
    (plan.policy / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match="policy_sha256"):
        evaluate(tmp_path / "out", plan)


def test_a_folder_whose_tasks_have_changed_is_refused(plan: Plan, tmp_path: Path) -> None:
    evaluate(tmp_path / "out", plan)
    tasks = (*plan.tasks[:4], Task("quiz/dev/other", {}), plan.tasks[5])
    with pytest.raises(UserError, match=r"task 4 was quiz/dev/4 there .* and is quiz/dev/other now"):
        evaluate(tmp_path / "out", replace(plan, tasks=tasks))


def test_a_folder_that_another_evaluation_writes_is_refused(plan: Plan, tmp_path: Path) -> None:
    request = Request(source=Path("quiz.toml"), out=tmp_path / "out", split="dev")
    with open_session(request, plan), pytest.raises(UserError, match="another evaluation writes there"):
        evaluate(tmp_path / "out", plan)


def test_a_folder_of_something_else_is_refused(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match=r"holds thesis\.tex and is no evaluation"):
        evaluate(out, plan)
    with pytest.raises(UserError, match="cannot be written"):
        evaluate(out / "thesis.tex", plan)


@pytest.mark.parametrize("line", ["{", "[]", '{"mode": "sampled"}', '"words"', '{"labels": 3}'])
def test_a_damaged_line_is_named_with_the_cure(line: str, plan: Plan, tmp_path: Path) -> None:
    evaluate(tmp_path / "out", plan)
    path = tmp_path / "out" / "episodes.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"episodes\.jsonl, line 3: no record of an episode .*delete the line"):
        evaluate(tmp_path / "out", plan)


def test_settings_that_are_no_json_are_named(plan: Plan, tmp_path: Path) -> None:
    evaluate(tmp_path / "out", plan)
    (tmp_path / "out" / "settings.json").write_text("{")
    with pytest.raises(UserError, match=r"settings\.json: not the settings of an evaluation"):
        evaluate(tmp_path / "out", plan)


def test_the_settings_say_where_everything_came_from(plan: Plan) -> None:
    settings = settings_of(Request(source=Path("quiz.toml")), plan)
    assert (settings["source"], settings["num"]) == ("quiz.toml", 6)
    assert json.loads(json.dumps(settings)) == settings


def test_a_row_read_from_a_line_is_the_row_it_was_made_of(plan: Plan, tmp_path: Path) -> None:
    session = evaluate(tmp_path / "out", plan)
    played: dict[Any, Row] = dict(session.log.rows)
    with open_session(Request(source=Path("quiz.toml"), out=tmp_path / "out", split="dev"), plan) as again:
        assert again.log.rows == played
