"""A predictor that learns: counts, corrected by a small network that looks at the prefix.

Owns belief, prediction and learning of `hashed` and `embedding`, which differ in how a prefix becomes numbers.
Invariants: those of the Protocol; a tree's lessons are made with the counts from before the tree, as its predictions
were; only the newest lessons are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from trace_async.core.types import FloatArray, Group, Json, Prefix
from trace_async.errors import ConfigError
from trace_async.predictors.counts import CountOptions, Counts, counts_from, counts_state, in_order
from trace_async.predictors.network import Adam, Network, read_arrays, tell_arrays
from trace_async.predictors.protocol import OPTIONS_KEY, Belief
from trace_async.predictors.replay import Lesson, Minibatch, Replay, join
from trace_async.predictors.rows import RowMaker
from trace_async.predictors.targets import tree_targets

NUM_SCALARS = 6
"""Is it a prompt; turns; length; its prompt's evidence as log-odds and as a share of belief; survival's log-odds."""

SUREST = 1e-4
"""No success is predicted nearer to 0 or 1, so that a belief is one."""

_LEARNING_DOMAIN = 0x6C6561726E  # keeps this generator apart from others that start from the run seed


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedOptions(CountOptions):
    """Options of predictors with a network."""

    hidden: int = 16  # units between prefix and logit
    learning_rate: float = 6e-4  # Adam's
    weight_decay: float = 0.01  # Adam's, on matrices
    steps: int = 6  # of Adam, each time trees are observed
    minibatch: int = 256  # lessons of one step, half of them prompts
    replay: int = 4096  # lessons kept of prompts, and as many of longer prefixes; the newest
    recency: float = 8.0  # a lesson is drawn half as often after so many observations
    loss: Literal["squared", "log"] = "squared"  # between prediction and the share of successes below a prefix

    def __post_init__(self) -> None:
        CountOptions.__post_init__(self)
        for name in ("hidden", "learning_rate", "steps", "replay", "recency"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{OPTIONS_KEY}.{name} must be more than 0, got {getattr(self, name)}")
        if self.minibatch < 2:
            raise ConfigError(f"{OPTIONS_KEY}.minibatch must be at least 2, got {self.minibatch}")
        if not 0.0 <= self.weight_decay * self.learning_rate < 1.0:
            raise ConfigError(f"{OPTIONS_KEY}.weight_decay must be >= 0, and < 1 times learning_rate")


class _Model(NamedTuple):
    """What predictions are made of; replaced as a whole by `load`."""

    version: int
    counts: Counts
    network: Network


class LearnedPredictor:
    """p(prefix) = sigmoid(counted + network(prefix)); the network starts at 0, so at first this is what `beta` says.

    The prompt: counted is the prior's log-odds, and the network sees none of the prompt's own evidence. A root rollout
    has v ~ Beta(c p + s, c (1-p) + f), s and f being that evidence and c = prior_rollouts what the network is worth.
    Below it: counted is the log-odds of `beta`, evidence and survival included, and the network sees the evidence too.
    A prompt whose tokens are not known has network 0.

    Learns from every prompt and prefix of a tree with leaves below it: squared error (or log loss) to the share of
    successes, weighted by the number of leaves; a prompt's lesson also by the share c / (c + s + f) of its belief that
    was the network's, because prompts come again by what their evidence says. Half of a minibatch are prompts.
    """

    def __init__(self, options: LearnedOptions, *, kind: str, rows: RowMaker, seed: int) -> None:
        self.quick_batch = rows.quick_batch
        self._options = options
        self._kind = kind
        self._rows = rows
        self._seed = seed
        self._model = _Model(0, Counts(options), self._fresh_network())
        self._optimizer = self._fresh_optimizer()
        self._replays = (Replay(options.replay), Replay(options.replay))  # of prompts, of longer prefixes
        self._observed = 0  # calls of `observe` that brought lessons

    @property
    def version(self) -> int:
        """Policy version of the state that was loaded last; 0 before any."""
        return self._model.version

    def prepare(self, prefixes: Sequence[Prefix]) -> None:
        """Make their rows, which whoever is slow about it keeps."""
        self._rows.make(prefixes)

    def score_prompts(self, prefixes: Sequence[Prefix]) -> list[Belief]:
        """The network's word of each prompt, and its own evidence."""
        model = self._model
        words = self._words(model, prefixes).tolist()
        return [self._belief(model.counts, prefix, word) for prefix, word in zip(prefixes, words, strict=True)]

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """As the class says; a prompt's is the mean of its belief."""
        model = self._model
        success = self._words(model, prefixes)
        for place, prefix in enumerate(prefixes):
            if prefix.turn_index == 0:
                success[place] = self._belief(model.counts, prefix, float(success[place])).mean
        return success

    def observe(self, groups: Sequence[Group]) -> None:
        """Make lessons of the trees, count their rollouts, and learn."""
        groups = in_order(groups)
        lessons = [lesson for group in groups for lesson in self._lessons(group)]
        for group in groups:
            self._model.counts.observe(group)
        if not lessons:
            return
        for prompts, replay in zip((True, False), self._replays, strict=True):
            replay.extend(lesson for lesson in lessons if bool(lesson.scalars[0]) is prompts)
        rng = np.random.default_rng((_LEARNING_DOMAIN, self._seed, self._observed))
        self._observed += 1
        half, recency = self._options.minibatch // 2, self._options.recency
        sources = [(replay, replay.chances(recency=recency)) for replay in self._replays if len(replay)]
        for _ in range(self._options.steps):
            self._learn(join([replay.draw(half, chances=chances, rng=rng) for replay, chances in sources]))

    def parameters(self) -> Json:
        """Counts and network."""
        counts, network = self._model.counts, self._model.network
        return {"kind": self._kind, "counts": counts_state(counts), "network": tell_arrays(network.parameters)}

    def state(self) -> Json:
        """With optimizer and replay."""
        prompts, prefixes = self._replays
        learning = {
            "optimizer": self._optimizer.state(),
            "prompts": prompts.state(),
            "prefixes": prefixes.state(),
            "observed": self._observed,
        }
        return {**self.parameters(), "learning": learning}

    def load(self, state: Json, *, version: int) -> None:
        """Take over what `state` or `parameters` returned; after the latter, learning starts without memory."""
        if set(state) - {"learning"} != {"kind", "counts", "network"} or state["kind"] != self._kind:
            raise ValueError(
                f"not the state of a predictor of kind {self._kind}: keys {sorted(state)}, kind {state.get('kind')!r}"
            )
        network = self._fresh_network()
        network.parameters = read_arrays(state["network"], like=network.parameters, what="network")
        model = _Model(version, counts_from(state["counts"], self._options), network)
        optimizer, replays, observed = self._read_learning(state.get("learning"))
        self._model, self._optimizer, self._replays, self._observed = model, optimizer, replays, observed

    # ---- predicting ----------------------------------------------------------------------------------------------

    def _words(self, model: _Model, prefixes: Sequence[Prefix]) -> FloatArray:
        """Success float32 [prefixes]; of prompts without their own evidence."""
        scalars, counted = look(model.counts, prefixes)
        logits = model.network.forward(self._rows.make(prefixes), scalars)
        known = np.array([prefix.token_ids.size > 0 for prefix in prefixes], np.bool_)
        success = _sigmoid(counted + np.where(known, logits, np.float32(0.0)))
        return np.clip(success, np.float32(SUREST), np.float32(1.0 - SUREST))

    def _belief(self, counts: Counts, prefix: Prefix, word: float) -> Belief:
        successes, failures = counts.evidence(prefix.prompt_id)
        weight = self._options.prior_rollouts
        return Belief(weight * word + successes, weight * (1.0 - word) + failures)

    # ---- learning ------------------------------------------------------------------------------------------------

    def _lessons(self, group: Group) -> list[Lesson]:
        targets = tree_targets(group)
        prefixes = [target.prefix for target in targets]
        counts = self._model.counts
        scalars, counted = look(counts, prefixes)
        novelty = 1.0 - counts.mean(group.prompt_id)[1]
        return [
            Lesson(
                row=row,
                scalars=scalars[place],
                counted=float(counted[place]),
                value=target.value,
                weight=target.leaves * (novelty if target.prefix.turn_index == 0 else 1.0),
                when=self._observed,
            )
            for place, (target, row) in enumerate(zip(targets, self._rows.make(prefixes), strict=True))
        ]

    def _learn(self, batch: Minibatch) -> None:
        network = self._model.network
        logits, passed = network.pass_for_learning(batch.rows, batch.scalars)
        success = _sigmoid(batch.counted + logits)
        error = success - batch.value
        if self._options.loss == "squared":
            error = 2.0 * error * success * (1.0 - success)
        outer = np.asarray(error * batch.weight / batch.weight.sum(), np.float32)
        self._optimizer.step(network.parameters, network.gradients(passed, outer))

    def _fresh_network(self) -> Network:
        return Network(self._rows.layer, num_scalars=NUM_SCALARS, hidden=self._options.hidden, seed=self._seed)

    def _fresh_optimizer(self) -> Adam:
        options = self._options
        like = self._model.network.parameters
        return Adam(like, learning_rate=options.learning_rate, weight_decay=options.weight_decay)

    def _read_learning(self, told: Any) -> tuple[Adam, tuple[Replay, Replay], int]:
        optimizer = self._fresh_optimizer()
        replays = (Replay(self._options.replay), Replay(self._options.replay))
        if told is None:
            return optimizer, replays, 0
        if not isinstance(told, dict) or set(told) != {"optimizer", "prompts", "prefixes", "observed"}:
            raise ValueError("state of a predictor: learning must have optimizer, prompts, prefixes and observed")
        if type(told["observed"]) is not int or told["observed"] < 0:
            raise ValueError(f"state of a predictor: observed must be a count, got {told['observed']!r}")
        optimizer.load(told["optimizer"])
        for replay, key in zip(replays, ("prompts", "prefixes"), strict=True):
            replay.load(told[key], num_scalars=NUM_SCALARS, row_dtype=self._rows.dtype, what=key)
        return optimizer, replays, told["observed"]


def look(counts: Counts, prefixes: Sequence[Prefix]) -> tuple[FloatArray, FloatArray]:
    """What is known of each prefix besides its tokens: scalars float32 [prefixes, NUM_SCALARS], and counted log-odds.

    Of a prompt, nothing of its own evidence.
    """
    base = _log_odds(counts.rate)
    scalars = np.zeros((len(prefixes), NUM_SCALARS), np.float32)
    counted = np.full(len(prefixes), base, np.float32)
    for place, prefix in enumerate(prefixes):
        length = math.log1p(prefix.token_ids.size) / 6.0
        if prefix.turn_index == 0:
            scalars[place] = (1.0, 0.0, length, 0.0, 0.0, 0.0)
            continue
        mean, seen = counts.mean(prefix.prompt_id)
        shift, survived = _log_odds(mean) - base, counts.survival_log_odds(prefix.turn_index)
        scalars[place] = (0.0, math.log1p(prefix.turn_index) / 3.0, length, shift / 2.0, seen, survived / 2.0)
        counted[place] += shift + survived
    return scalars, counted


def _log_odds(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


def _sigmoid(logits: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x)), float32, without overflow."""
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * logits), np.float32)
