"""What `[environment.options]` of multihop_qa may say; ConfigError when a value or a combination is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from envs.multihop_qa.game import NO_SCORE
from envs.multihop_qa.prompts import PromptOptions
from envs.multihop_qa.rewards import REWARDS, STAGED, RewardOptions
from envs.multihop_qa.signals import PROCESS_SIGNALS
from envs.multihop_qa.tags import TagOptions
from envs.multihop_qa.tasks import HELDOUT, TRAIN
from envs.multihop_qa.world.options import WorldOptions
from envs.retrieval.registry import RetrieverOptions
from trace_async.errors import ConfigError

NEW_WORLD = "new_world"
"""Split and collection of a world that shares no name with the one that is trained on."""

FROM_QUESTIONS = "questions"
"""In `corpus`: the paragraphs that the question files bring along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultihopOptions:
    """Question files are "FORMAT:PATH" or "PATH", read below the folder `data`."""

    # Which questions: files, a world made in memory, or a world folder
    data: str = ""  # folder of relative paths; "": the working folder
    train: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    aliases: str = ""  # alias file of 2Wiki, for the sources "2wiki:PATH"
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # further splits, for evaluation
    world: WorldOptions | None = None
    world_folder: str = ""  # written by `trace-async make-world`
    hops: tuple[int, ...] = ()  # only questions with so many hops; empty: all
    kinds: tuple[str, ...] = ()  # only questions of these kinds; empty: all
    limit: int = 0  # the first so many of each split; 0: all
    # What is searched
    corpus: tuple[str, ...] = ()  # files below `data`, or "questions"; beside the pages of a world
    retriever: RetrieverOptions = field(default_factory=RetrieverOptions)
    top_k: int = 3  # passages a search shows
    # How it is played
    tags: TagOptions = field(default_factory=TagOptions)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    max_turns: int = 4  # turns that may search; one more is left for the answer
    passage_tokens: int = 0  # of each passage's text; 0: no limit of its own
    observation_tokens: int = 500  # of all passages of one reply; words where no tokenizer is known
    unreadable_ends: bool = False  # a turn that cannot be read ends the episode, instead of costing a turn
    # What it is worth
    reward: str = "em"
    reward_options: RewardOptions = field(default_factory=RewardOptions)
    process_score: str = NO_SCORE  # what judges a single turn: gold_page, new_page, sub_answer
    # Scripted play
    ask_rate: float = 0.0  # probability that the script searches with a sub-question instead of the page's title

    def __post_init__(self) -> None:
        for name, least in {
            "top_k": 1,
            "max_turns": 1,
            "observation_tokens": 1,
            "passage_tokens": 0,
            "limit": 0,
        }.items():
            if getattr(self, name) < least:
                raise ConfigError(f"environment.options.{name}: need >= {least}, got {getattr(self, name)}")
        for name, choices in {"reward": (*REWARDS, STAGED), "process_score": (NO_SCORE, *PROCESS_SIGNALS)}.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"environment.options.{name}: need one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.reward not in (STAGED, "search_r1_format") and self.reward_options != RewardOptions():
            raise ConfigError(
                f"environment.options.reward_options: reward {self.reward!r} does not read them; leave them out, "
                f'or choose "search_r1_format" or "{STAGED}"'
            )
        if not 0.0 <= self.ask_rate <= 1.0:
            raise ConfigError(f"environment.options.ask_rate: need 0 <= rate <= 1, got {self.ask_rate}")
        self._check_sources()

    @property
    def has_world(self) -> bool:
        return self.world is not None or bool(self.world_folder)

    def _check_sources(self) -> None:
        where = "environment.options"
        ways = [bool(self.train or self.heldout), self.world is not None, bool(self.world_folder)]
        if sum(ways) != 1:
            raise ConfigError(
                f"{where}: questions come from train and heldout files, from a world table, or from a world_folder; "
                f"exactly one of the three must be given, not {sum(ways)}"
            )
        if not self.has_world and not (self.train and self.heldout):
            missing = HELDOUT if self.train else TRAIN
            raise ConfigError(f"{where}.{missing}: give at least one question file; train and heldout are both needed")
        for name in (TRAIN, HELDOUT, NEW_WORLD):
            if name in self.sets:
                raise ConfigError(f"{where}.sets.{name}: this name is taken, call the set something else")
        for name, sources in self.sets.items():
            if not sources:
                raise ConfigError(f"{where}.sets.{name}: give at least one question file")
        sources = (*self.train, *self.heldout, *chain.from_iterable(self.sets.values()))
        if self.aliases and not any(source.startswith("2wiki:") for source in sources):
            raise ConfigError(
                f'{where}.aliases: they go with question files written as "2wiki:PATH", and there is none'
            )
        if not self.has_world and not self.corpus and self.retriever.kind != "http":
            raise ConfigError(
                f'{where}.corpus: nothing to search; give files, or "{FROM_QUESTIONS}" for the paragraphs of the '
                "question files, or a remote retriever"
            )
