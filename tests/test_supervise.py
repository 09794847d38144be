"""The supervisor against real processes of a scripted program: order of phases, deaths, restarts and both stops."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trace_async.app.supervise import ChildFailed, Interrupted, Supervisor
from trace_async.config import ActorConfig, Config
from trace_async.run_folder import RunFolder

# One line per event in RUN/story. What a role does is a line of Python in RUN/ROLE.do, by default the good run.
PROGRAM = """
import os, signal, sys
role, root = sys.argv[1], sys.argv[2]
name = sys.argv[sys.argv.index("--id") + 1] if "--id" in sys.argv else role
def say(what):
    with open(os.path.join(root, "story"), "a") as story:
        story.write(f"{name} {what}\\n")
def wait():
    sys.stdin.read()
def count(what):
    with open(os.path.join(root, "story")) as story:
        return story.read().split("\\n").count(f"{name} {what}")
def on_term(then):
    signal.signal(signal.SIGTERM, lambda *_: (say("told"), then and sys.exit(0)))
say("starts")
script = os.path.join(root, f"{role}.do")
if os.path.exists(script):
    exec(open(script).read())
"""


@dataclass(slots=True)
class QuietScreen:
    """Remembers the phases; `at` is called with each."""

    at: Callable[[str], None] = lambda phase: None
    phases: list[str] = field(default_factory=list)

    def say_phase(self, phase: str) -> None:
        self.phases.append(phase)
        self.at(phase)

    async def run(self) -> None:
        await asyncio.Event().wait()


@dataclass(slots=True)
class Stage:
    """One run folder with its scripted program."""

    root: Path
    screen: QuietScreen = field(default_factory=QuietScreen)
    actors: int = 1
    drain_s: float = 5.0

    def script(self, role: str, line: str) -> None:
        (self.root / f"{role}.do").write_text(line, encoding="utf-8")

    def run(self, *, resume: bool = False) -> None:
        program = self.root / "program.py"
        program.write_text(PROGRAM, encoding="utf-8")
        config = Config(actor=ActorConfig(count=self.actors, drain_s=self.drain_s))
        command = (sys.executable, "-S", str(program))
        supervisor = Supervisor(config, folder=RunFolder(self.root), screen=self.screen, command=command)
        asyncio.run(supervisor.run(resume=resume))

    @property
    def story(self) -> list[str]:
        return (self.root / "story").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    os.mkfifo(tmp_path / "gate")
    stage.script("actor", "wait()")
    return stage


# A named pipe holds the learner until an actor has come this far: no order is left to the machine's speed.
UNTIL_GATE = "open(root + '/gate').read()"
OPEN_GATE = "open(root + '/gate', 'w').close()"
FOR_EVER = "while True: signal.pause()"


def test_a_run_evaluates_trains_and_evaluates_again(stage: Stage) -> None:
    stage.script("learner", UNTIL_GATE)
    stage.script("actor", OPEN_GATE)
    stage.run()
    assert [line for line in stage.story if "actor" not in line] == ["eval starts", "learner starts", "eval starts"]
    assert stage.story.count("actor-0 starts") == 1
    assert [phase.split()[0] for phase in stage.screen.phases] == ["playing", "training", "playing"]


def test_a_resumed_run_does_not_evaluate_the_start_again(stage: Stage) -> None:
    before = RunFolder(stage.root).evaluation("before")
    before.parent.mkdir()
    before.write_text("{}", encoding="utf-8")
    stage.script("actor", "")
    stage.run(resume=True)
    assert stage.story.count("eval starts") == 1


def test_a_dead_learner_ends_the_run_with_its_last_words(stage: Stage) -> None:
    stage.script("learner", "print('loss is NaN', file=sys.stderr); sys.exit(1)")
    with pytest.raises(ChildFailed, match=r"learner ended with exit code 1.*\n  loss is NaN") as caught:
        stage.run()
    assert caught.value.code == 1


def test_a_killed_learner_is_named_with_its_signal(stage: Stage) -> None:
    stage.script("learner", "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ChildFailed, match="learner was killed by SIGKILL"):
        stage.run()


def test_a_dead_actor_is_started_again(stage: Stage) -> None:
    stage.script("learner", UNTIL_GATE)
    stage.script("actor", f"if count('starts') < 3: os.kill(os.getpid(), signal.SIGKILL)\n{OPEN_GATE}")
    stage.run()
    assert stage.story.count("actor-0 starts") == 3


def test_what_a_killed_actor_started_and_left_behind_is_killed(stage: Stage) -> None:
    orphan = "p = os.fork()\nif p == 0:\n    while True: signal.pause()\nsay(f'left {p}')\n"
    stage.script("learner", UNTIL_GATE)
    stage.script(
        "actor",
        f"if count('starts') < 2:\n    {orphan.replace(chr(10), chr(10) + '    ')}\n    "
        f"os.kill(os.getpid(), signal.SIGKILL)\n{OPEN_GATE}",
    )
    stage.run()
    left = [int(line.split()[-1]) for line in stage.story if " left " in line]
    assert len(left) == 1
    state = Path(f"/proc/{left[0]}/stat")
    assert not state.exists() or state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"


def test_an_actor_that_keeps_dying_ends_the_run(stage: Stage) -> None:
    stage.script("learner", "wait()")
    stage.script("actor", "print('no libfoo'); sys.exit(1)")
    with pytest.raises(ChildFailed, match=r"actor-0 ended with exit code 1.*\n.*no libfoo"):
        stage.run()
    assert stage.story.count("actor-0 starts") == 6


def test_an_actor_that_refuses_its_input_is_not_started_again(stage: Stage) -> None:
    stage.script("learner", "wait()")
    stage.script("actor", "sys.exit(2)")
    with pytest.raises(ChildFailed) as caught:
        stage.run()
    assert caught.value.code == 2
    assert stage.story.count("actor-0 starts") == 1


def test_the_first_signal_lets_everyone_finish(stage: Stage) -> None:
    stage.actors = 2
    stage.script("learner", f"on_term(True)\n{UNTIL_GATE}\nos.kill(os.getppid(), signal.SIGINT)\nwait()")
    stage.script("actor", f"on_term(True)\nif name == 'actor-0': {OPEN_GATE}\nwait()")
    with pytest.raises(Interrupted):
        stage.run()
    assert "learner told" in stage.story
    assert "actor-0 told" in stage.story
    assert stage.story.count("eval starts") == 1
    assert "stopping in order" in stage.screen.phases[-1]


def test_the_second_signal_does_not_wait(stage: Stage) -> None:
    stage.drain_s = 3600
    stage.script("learner", f"on_term(False)\nos.kill(os.getppid(), signal.SIGTERM)\n{FOR_EVER}")
    stage.script("actor", FOR_EVER)

    def press_again(phase: str) -> None:
        if phase.startswith("stopping in order"):
            os.kill(os.getpid(), signal.SIGINT)

    stage.screen.at = press_again
    with pytest.raises(Interrupted):
        stage.run()
    assert stage.screen.phases[-1] == "stopping at once"


def test_an_actor_that_does_not_drain_in_time_is_killed(stage: Stage) -> None:
    stage.drain_s = 0.2
    stage.script("learner", f"on_term(True)\n{UNTIL_GATE}\nos.kill(os.getppid(), signal.SIGTERM)\nwait()")
    stage.script("actor", f"on_term(False)\n{OPEN_GATE}\n{FOR_EVER}")
    with pytest.raises(Interrupted):
        stage.run()
    assert "actor-0 told" in stage.story


def test_logs_of_every_process_lie_in_the_run_folder(stage: Stage) -> None:
    stage.script("learner", f"print('hello from the learner')\n{UNTIL_GATE}")
    stage.script("actor", OPEN_GATE)
    stage.run()
    logs = {path.name for path in (stage.root / "logs").iterdir()}
    assert logs == {"learner.log", "actor-0.log", "eval-before.log", "eval-after.log"}
    assert "hello" in RunFolder(stage.root).log("learner").read_text(encoding="utf-8")
