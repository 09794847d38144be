"""What one optimizer step samples and trains, how old its data will be, and what the whole run adds up to.

Pure arithmetic on the configuration and on what is assumed of an average rollout. Bounds hold for every run; expected
numbers are as good as the assumptions. docs/plan.md derives the formulas. Legend: M root rollouts of a step, N
continuations of each, A coordinator.max_age_steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trace_async.app.plan_sizes import ModelShape, count
from trace_async.config import Config
from trace_async.errors import ConfigError
from trace_async.methods.objective_kinds import Scope, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An average root rollout."""

    turns: float
    turn_tokens: float  # sampled in one turn
    observation_tokens: float  # between two turns
    prompt_tokens: float
    turn_limit: int  # no rollout has more

    @property
    def suffix_turns(self) -> float:
        """Mean turns of a continuation that starts behind any turn but the last of any rollout.

        Long rollouts have more such places. Lengths are taken as equally likely between 1 and the limit, as far
        around the mean as both allow.
        """
        if self.turns <= 1:
            return 1.0
        reach = min(self.turns - 1, max(0.0, self.turn_limit - self.turns))
        variance = reach * (reach + 1) / 3
        return max(1.0, self.turns / 2 + variance / (2 * (self.turns - 1)))

    @property
    def sampled(self) -> float:
        """Tokens."""
        return self.turns * self.turn_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """One optimizer step."""

    roots: int
    continuations: int  # at most: an allocator may hold some back
    prompts: int  # trees, for beliefs as they are at the start
    prompts_looked_at: int  # drawn from the stream for them
    turns: float
    turns_in_a_row: float  # of a tree, one after the other
    sampled_tokens: float
    sampled_tokens_least: int
    sampled_tokens_most: int
    observation_tokens: float
    prompt_tokens: float  # once for each tree
    packed_tokens: float  # that the learner computes: prompts, turns and observations, each once
    micro_batches: int  # at least
    passes_forward: int  # over each micro-batch, that of the backward pass included
    operations: float  # floating point operations of the learner; attention over long contexts is not counted

    @property
    def leaves(self) -> int:
        """Ends of rollouts."""
        return self.roots + self.continuations


def step_load(config: Config, shape: ModelShape, rollout: Rollout, *, prompts: int, prompts_looked_at: int) -> StepLoad:
    """The load of one step; `prompts` trees grow of `prompts_looked_at` candidates."""
    tree, learner = config.tree, config.learner
    roots, continuations = tree.roots_per_step, tree.roots_per_step * tree.continuations_per_root
    turns = roots * rollout.turns + continuations * rollout.suffix_turns
    sampled = turns * rollout.turn_tokens
    between = roots * (rollout.turns - 1) + continuations * (rollout.suffix_turns - 1)
    opening = prompts * rollout.prompt_tokens
    packed = sampled + between * rollout.observation_tokens + opening
    micro_batches = max(learner.updates_per_step, math.ceil(packed / learner.micro_batch_tokens))
    passes = _forward_passes(config, micro_batches)
    longest = tree.max_context_tokens - 1
    below = max(1, rollout.turn_limit - 1)
    return StepLoad(
        roots=roots,
        continuations=continuations,
        prompts=prompts,
        prompts_looked_at=prompts_looked_at,
        turns=turns,
        turns_in_a_row=rollout.turns + (rollout.suffix_turns if continuations else 0.0),
        sampled_tokens=sampled,
        sampled_tokens_least=roots,
        sampled_tokens_most=roots * min(rollout.turn_limit * config.engine.max_turn_tokens, longest)
        + continuations * min(below * config.engine.max_turn_tokens, longest),
        observation_tokens=between * rollout.observation_tokens,
        prompt_tokens=opening,
        packed_tokens=packed,
        micro_batches=micro_batches,
        passes_forward=passes,
        operations=_operations(shape, packed=packed, scored=sampled, passes=passes, recomputed=passes_again(config)),
    )


def passes_again(config: Config) -> int:
    """Forward passes of layers that activation checkpointing adds."""
    return int(config.learner.activation_checkpointing)


def _forward_passes(config: Config, micro_batches: int) -> int:
    """One, and one more where an objective needs all log-probabilities of an update before the first gradient."""
    kind, several = kind_of(config.objective), micro_batches > config.learner.updates_per_step
    braked = kind.braked and config.objective.m2_budget > 0
    looks_ahead = several and (braked or kind.scope is not Scope.TURN)  # of trees: only where one is cut; at most
    proximal = kind.anchors and config.objective.proximal == "recomputed"
    return 1 + looks_ahead + proximal


def _operations(shape: ModelShape, *, packed: float, scored: float, passes: int, recomputed: int) -> float:
    """2 for each weight and token of a forward pass, 4 of a backward pass; the head is computed anew there."""
    layers = shape.layers * count(shape.layer())
    head = shape.vocabulary * shape.hidden
    return 2.0 * packed * layers * (passes + 2 + recomputed) + 2.0 * scored * head * (passes + 3)


# ---- ages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """How many steps old a turn is when it is trained."""

    most: int  # the hard bound
    max_permits: int  # root rollouts under way at most, (A + 1) M
    capacity: int  # root rollouts that the actors hold at most; 0: unknown
    live_roots: float  # expected under way when actors are never idle
    if_actors_are_slower: tuple[float, float]  # mean age: a learner that hardly works, one just busy
    if_learner_is_slower: float
    expected: float | None = None  # with rates
    learner_busy: float | None = None  # share of the time
    waits: str = ""  # who waits for whom
    step_s: float | None = None


def ages(
    config: Config, *, capacity: int, step: StepLoad, sampled_per_s: float | None, trained_per_s: float | None
) -> Ages:
    """Expected ages, by Little's law; both rates are in sampled tokens per second, and None together.

    Raises ConfigError for a rate that is not positive.
    """
    bound = config.coordinator.max_age_steps
    known = Ages(
        most=bound,
        max_permits=config.max_permits,
        capacity=capacity,
        live_roots=_live_roots(config, capacity, busy=0.0),
        if_actors_are_slower=(_age(config, capacity, busy=0.0), _age(config, capacity, busy=1.0)),
        if_learner_is_slower=float(bound),
    )
    if sampled_per_s is None or trained_per_s is None:
        return known
    for option, rate in (("--sampled-tokens-per-s", sampled_per_s), ("--trained-tokens-per-s", trained_per_s)):
        if not 0 < rate < math.inf:
            raise ConfigError(f"{option} must be a positive number of tokens, got {rate:g}")
    sampling_s, training_s = step.sampled_tokens / sampled_per_s, step.sampled_tokens / trained_per_s
    if _takes_turns(config):
        step_s = sampling_s + training_s
        return replace(
            known, expected=float(bound), learner_busy=training_s / step_s, waits="they take turns", step_s=step_s
        )
    busy = training_s / sampling_s
    if busy >= 1.0:
        return replace(known, expected=float(bound), learner_busy=1.0, waits="actors for permits", step_s=training_s)
    expected = _age(config, capacity, busy=busy)
    return replace(known, expected=expected, learner_busy=busy, waits="the learner for trees", step_s=sampling_s)


def _takes_turns(config: Config) -> bool:
    """Whether nothing is sampled while a step is trained."""
    return config.coordinator.lockstep or config.coordinator.max_age_steps == 0


def _live_roots(config: Config, capacity: int, *, busy: float) -> float:
    """What actors hold when the learner is `busy` that share of the time.

    Of the permits one round is on average still on the shelf or not yet planned (half and half), and `busy` of one is
    being trained.
    """
    permits = max(0.0, config.coordinator.max_age_steps - busy) * config.tree.roots_per_step
    return min(float(capacity), permits) if capacity else permits


def _age(config: Config, capacity: int, *, busy: float) -> float:
    """Mean age when actors are never idle: half of what is under way, in steps, and the learner's share of a step."""
    if _takes_turns(config):
        return float(config.coordinator.max_age_steps)
    age = _live_roots(config, capacity, busy=busy) / (2 * config.tree.roots_per_step) + busy
    return min(age, float(config.coordinator.max_age_steps))


# ---- the run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The whole run."""

    steps: int
    roots: int
    sampled_tokens: float
    trees: int  # one for each prompt and round
    prompts_looked_at: int
    epochs: float | None  # of the training pool, by prompts looked at; None: the pool has no end
    hours: float | None  # of training, with rates


def totals(config: Config, step: StepLoad, *, step_s: float | None) -> Totals:
    """`learner.max_steps` of these steps, or fewer where `learner.max_sampled_tokens` ends the run."""
    steps, limit = config.learner.max_steps, config.learner.max_sampled_tokens
    if limit:
        steps = min(steps, max(1, math.ceil(limit / step.sampled_tokens)))
    looked_at = steps * step.prompts_looked_at
    pool = config.prompts.num_train
    return Totals(
        steps=steps,
        roots=steps * step.roots,
        sampled_tokens=steps * step.sampled_tokens,
        trees=steps * step.prompts,
        prompts_looked_at=looked_at,
        epochs=looked_at / pool if pool else None,
        hours=None if step_s is None else steps * step_s / 3600,
    )
