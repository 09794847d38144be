"""Which combinations with `objective.kind` make no sense: a ratio that is always one, a number that nobody supplies.

Pure, without torch; values by themselves are `config_check`'s. Every complaint has its cure.
"""

from __future__ import annotations

from collections.abc import Iterator

from trace_async.config import Config
from trace_async.errors import ConfigError
from trace_async.methods.credit import CREDITS, LEAF_RULES
from trace_async.methods.objective_kinds import (
    KINDS,
    ClipOptions,
    LpoOptions,
    M2poOptions,
    VtraceOptions,
    WindowOptions,
    kind_of,
    options_of,
)


def check_objective(config: Config) -> None:
    """Raises ConfigError with every complaint; an unknown kind or option is the first and only one."""
    options_of(config.objective)
    problems = [f"{key}: {what}" for key, what in find_objective_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def find_objective_problems(config: Config) -> list[tuple[str, str]]:
    """Every (key path, what is wrong and the cure). Raises ConfigError for an unknown kind or option."""
    return [
        *_check_anchor(config),
        *_check_credit(config),
        *_check_clips(config),
        *_check_idle(config),
    ]


def _check_anchor(config: Config) -> Iterator[tuple[str, str]]:
    kind, proximal = config.objective.kind, config.objective.proximal
    key, max_age_steps = "objective.proximal", config.coordinator.max_age_steps
    if proximal == "behaviour":
        return
    if not kind_of(config.objective).anchors:
        takers = ", ".join(repr(name) for name, other in KINDS.items() if other.anchors)
        yield (
            key,
            f"is {proximal!r}, but objective.kind = {kind!r} takes its ratios to the policy that sampled; set it to "
            f"'behaviour', or use one of the kinds {takers}",
        )
    elif proximal == "recomputed" and config.learner.updates_per_step == 1:
        yield (
            key,
            "is 'recomputed', but with learner.updates_per_step = 1 the weights that a step starts from are those that "
            "it trains: every ratio is exactly 1 and no clip ever acts; set learner.updates_per_step to 2 or more, or "
            "objective.proximal = 'behaviour'",
        )
    elif proximal == "interpolated" and max_age_steps <= 1:
        yield (
            key,
            f"is 'interpolated', one step behind the trained policy, but with coordinator.max_age_steps = "
            f"{max_age_steps} that is the policy that sampled; set it to 'behaviour', or allow ages of 2 and more",
        )
    elif proximal == "interpolated" and config.engine.on_update == "continue":
        yield (
            key,
            "is 'interpolated', which needs the one version that sampled a token, but engine.on_update = 'continue' "
            "lets a turn go on under new weights and only the oldest and newest version of a turn are recorded; set "
            "engine.on_update = 'drain', or another anchor",
        )


def _check_credit(config: Config) -> Iterator[tuple[str, str]]:
    kind, credit, tree = config.objective.kind, config.learner.credit, config.tree
    if kind_of(config.objective).needs_leaves and credit in CREDITS and credit not in LEAF_RULES:
        yield (
            "learner.credit",
            f"is {credit!r}, which compares turns and gives leaves no advantage of their own, but objective.kind = "
            f"{kind!r} weighs every leaf by the ratio of its whole path; set it to one of "
            f"{', '.join(repr(name) for name in sorted(LEAF_RULES))}",
        )
    if tree.max_roots_per_prompt == 1 and tree.continuations_per_root == 0:
        yield (
            "tree.max_roots_per_prompt",
            "is 1 and tree.continuations_per_root is 0: every prompt has one rollout and nothing to compare it with, "
            "so nothing is ever trained; raise one of them",
        )


def _check_clips(config: Config) -> Iterator[tuple[str, str]]:
    """A veto takes a turn out before the clip of a ratio to the same policy would act."""
    objective, options = config.objective, options_of(config.objective)
    if objective.proximal != "behaviour":
        return
    low, name = _lowest(options)
    if low is not None and objective.veto_token >= low:
        yield (
            "objective.veto_token",
            f"is {objective.veto_token:g}: a turn with a token ratio below it gets no loss, so objective.options."
            f"{name}, which acts below {low:g}, never does; lower it to less than {low:g}",
        )
    if objective.kind != "gspo_turn":
        return
    if objective.veto_low >= 1.0 - options.clip_low:
        yield (
            "objective.veto_low",
            f"is {objective.veto_low:g}: a turn whose geometric ratio is below gets no loss, so objective.options."
            f"clip_low = {options.clip_low:g} never acts; lower it to less than {1.0 - options.clip_low:g}",
        )
    if objective.veto_high <= 1.0 + options.clip_high:
        yield (
            "objective.veto_high",
            f"is {objective.veto_high:g}: a turn whose geometric ratio is above gets no loss, so objective.options."
            f"clip_high = {options.clip_high:g} never acts; raise it to more than {1.0 + options.clip_high:g}",
        )


def _lowest(options: object) -> tuple[float | None, str]:
    """Below which token ratio something acts, and the option that says so."""
    match options:
        case ClipOptions():
            return 1.0 - options.clip_low, "clip_low"
        case LpoOptions():
            return 1.0 - options.epsilon, "epsilon"
        case WindowOptions():
            return options.low, "low"
    return None, ""


def _check_idle(config: Config) -> Iterator[tuple[str, str]]:
    """Options that were set and that another option keeps from doing anything."""
    options, given = options_of(config.objective), config.objective.options
    for name, switch, wanted in _SWITCHED.get(type(options), ()):
        if name in given and getattr(options, switch) not in wanted:
            cure = " or ".join(repr(choice) for choice in wanted)
            yield (
                f"objective.options.{name}",
                f"is {given[name]!r}, but objective.options.{switch} = {getattr(options, switch)!r} does not read it; "
                f"remove it, or set {switch} = {cure}",
            )


_SWITCHED: dict[type, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    LpoOptions: (("alpha", "divergence", ("alpha",)),),
    M2poOptions: (("floor_low", "variant", ("clip",)), ("floor_high", "variant", ("clip",))),
    VtraceOptions: (
        ("future_bar", "future", ("geometric", "product")),
        ("prefix_bar", "prefix", ("minimum", "product")),
    ),
}
"""By kind: an option, the one that decides whether it is read, and for which of its values it is."""
