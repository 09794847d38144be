"""The kit of multihop_qa: options read, the parts put together. Never: any part's own business."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from envs.multihop_qa.episode import MultihopQA
from envs.multihop_qa.game import Rules, cut_words
from envs.multihop_qa.library import Library
from envs.multihop_qa.options import MultihopOptions
from envs.multihop_qa.oracle import Oracle
from envs.multihop_qa.prompts import make_script
from envs.multihop_qa.sources import make_sources
from envs.multihop_qa.tasks import Choice, MultihopTasks
from envs.options import read_options
from trace_async.core.types import Task
from trace_async.environment import CutText, EnvironmentKit


def make_multihop_qa(options: Mapping[str, Any]) -> EnvironmentKit:
    """The kit for `environment.name = "multihop_qa"`. Reads no file and makes no world yet."""
    read = read_options(MultihopOptions, options, owner="multihop_qa")
    sources = make_sources(read)
    library = Library(read.retriever, sources.collections)
    choice = Choice(frozenset(read.hops), frozenset(read.kinds), read.limit)
    return _kit(read, library, MultihopTasks(sources.splits, choice), cut_words)


def labels(task: Task) -> dict[str, str]:
    """Data set, number of hops, kind and level, as far as the question's source tells."""
    named = {name: task.data.get(name) for name in ("dataset", "hops", "kind", "level")}
    return {name: str(value) for name, value in named.items() if value}


def _kit(options: MultihopOptions, library: Library, tasks: MultihopTasks, cut: CutText) -> EnvironmentKit:
    script = make_script(
        options.tags, options.prompt, max_turns=options.max_turns, unreadable_ends=options.unreadable_ends
    )
    rules = Rules(
        script=script,
        max_turns=options.max_turns,
        passage_tokens=options.passage_tokens,
        observation_tokens=options.observation_tokens,
        unreadable_ends=options.unreadable_ends,
        reward=options.reward,
        reward_options=options.reward_options,
        process_score=options.process_score,
        cut=cut,
    )
    make_environment = partial(MultihopQA, rules, library, top_k=options.top_k)
    oracle = Oracle(make_environment, script.style, options.max_turns, options.ask_rate)
    return EnvironmentKit(
        make_environment,
        tasks,
        opening=lambda task: script.opening(str(task.data["question"])),
        labels=labels,
        demonstrate=oracle.demonstrate,
        bind=lambda cut: _kit(options, library, tasks, cut),
        prepare=lambda split: library.prepare(tasks.collection(split)),
        close=library.close,
    )
