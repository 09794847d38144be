"""What values and combinations of the configuration make sense, as data and small rules.

Pure: takes a `Config`, returns (key path, what is wrong and the cure). Every number has a range here (a test holds it).
Names of allocators, credit rules, predictors and environments are checked where those are built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from trace_async.config import Config


class Range(NamedTuple):
    """Allowed values; `low` itself is allowed unless `above`, `high` itself unless `below`."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        low_ok = value > self.low if self.above else value >= self.low
        return low_ok and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"{'>' if self.above else '>='} {self.low:.12g}"
        return low if math.isinf(self.high) else f"{low} and {'<' if self.below else '<='} {self.high:.12g}"


_POSITIVE = Range(0, above=True)
_COUNT = Range(1)
_COUNT_OR_NONE = Range(0)

RANGES: dict[str, Range] = {
    "run.seed": Range(0, 2**32, below=True),  # what NumPy and torch both take
    "environment.success_above": Range(-1e9, 1e9),  # outcomes are float32
    "environment.step_deadline_s": _POSITIVE,
    "engine.max_batch": _COUNT,
    "engine.max_turn_tokens": _COUNT,
    "engine.temperature": Range(0.01, 100),  # below, sampling is greedy and its log-probabilities are useless
    "engine.threads": _COUNT,
    "engine.request_deadline_s": _POSITIVE,
    "engine.prefix_cache_bytes": _COUNT_OR_NONE,
    "tree.roots_per_step": _COUNT,
    "tree.continuations_per_root": _COUNT_OR_NONE,
    "tree.max_roots_per_prompt": _COUNT,
    "tree.max_turns": _COUNT,
    "tree.max_context_tokens": Range(2),
    "prompts.num_train": _COUNT_OR_NONE,
    "prompts.candidates_per_round": _COUNT,
    "prompts.num_heldout": _COUNT,
    "predictor.max_batch": _COUNT,
    "predictor.deadline_s": _POSITIVE,
    "coordinator.max_age_steps": _COUNT_OR_NONE,
    "coordinator.soft_age_steps": _COUNT_OR_NONE,
    "coordinator.lease_deadline_s": _POSITIVE,
    "coordinator.max_attempts": _COUNT,
    "coordinator.heartbeat_s": _POSITIVE,
    "coordinator.dead_after_s": _POSITIVE,
    "publication.keep_versions": Range(2),  # the newest, and the one that may be under way
    "actor.count": Range(0),
    "actor.max_live_roots": _COUNT,
    "actor.drain_s": Range(0),
    "learner.max_steps": _COUNT,
    "learner.max_sampled_tokens": _COUNT_OR_NONE,
    "learner.learning_rate": _POSITIVE,
    "learner.adam_beta1": Range(0, 1, below=True),
    "learner.decay_to": Range(0, 1),
    "learner.adam_beta2": Range(0, 1, below=True),
    "learner.adam_eps": Range(0, above=True),
    "learner.weight_decay": Range(0),
    "learner.warmup_steps": _COUNT_OR_NONE,
    "learner.max_grad_norm": _POSITIVE,
    "learner.updates_per_step": _COUNT,
    "learner.micro_batch_tokens": _COUNT,
    "learner.threads": _COUNT,
    "learner.processes": _COUNT,
    "learner.rank_deadline_s": _POSITIVE,
    "learner.checkpoint_every_steps": _COUNT,
    "learner.keep_checkpoints": _COUNT,
    "learner.lora_rank": _COUNT_OR_NONE,
    "learner.lora_alpha": _POSITIVE,
    "objective.cap_positive": Range(1),
    "objective.cap_negative": Range(1),
    "objective.cap_decay": Range(0, 1),
    "objective.veto_low": Range(0, 1, below=True),
    "objective.veto_high": Range(1, above=True),
    "objective.veto_token": Range(0, 1, below=True),
    "objective.m2_budget": Range(0),
    "evaluation.num_prompts": _COUNT_OR_NONE,
}

CHOICES: dict[str, tuple[str, ...]] = {
    "engine.kind": ("local", "vllm", "vllm_server"),
    "engine.dtype": ("float32", "bfloat16"),
    "engine.on_update": ("drain", "continue"),
    "learner.schedule": ("constant", "linear", "cosine"),
    "learner.compute_dtype": ("float32", "bfloat16"),
    "objective.proximal": ("behaviour", "recomputed", "interpolated"),
}

MAY_BE_EMPTY = ("engine.server_url", "publication.directory", "publication.address")
"""Texts whose empty value stands for something."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def find_problems(config: Config) -> list[tuple[str, str]]:
    """Every (key path, complaint); empty when the configuration can run. Combinations only when each value is fine."""
    return [*_check_values(config)] or [
        *_check_budget(config),
        *_check_road(config),
        *_check_sizes(config),
        *_check_server(config),
        *_check_training(config),
    ]


def leaf_values(section: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(key path, value) of every key, in the order of declaration."""
    assert is_dataclass(section)
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from leaf_values(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _check_values(config: Config) -> Iterator[tuple[str, str]]:
    for key, value in leaf_values(config):
        if key in RANGES and value not in RANGES[key]:
            yield key, f"must be {RANGES[key]}, got {value}"
        elif key in CHOICES and value not in CHOICES[key]:
            yield key, f"must be one of {', '.join(CHOICES[key])}, got {value!r}"
        elif value == "" and key not in MAY_BE_EMPTY:
            yield key, "must not be empty"


def _check_budget(config: Config) -> Iterator[tuple[str, str]]:
    tree, actor, prompts = config.tree, config.actor, config.prompts
    if tree.allocator == "uniform" and tree.continuations_per_root > 0:
        yield (
            "tree.continuations_per_root",
            f"is {tree.continuations_per_root}, but the uniform allocator grows chains only; "
            "set it to 0, or use tree.allocator = 'random', 'arpo' or 'trace'",
        )
    if actor.max_live_roots < tree.max_roots_per_prompt:
        yield (
            "actor.max_live_roots",
            f"is {actor.max_live_roots}, but one tree may need tree.max_roots_per_prompt = {tree.max_roots_per_prompt} "
            "root rollouts at once and would never be leased; raise it to at least that",
        )
    if prompts.candidates_per_round * tree.max_roots_per_prompt < tree.roots_per_step:
        yield (
            "tree.roots_per_step",
            f"is {tree.roots_per_step}, more than prompts.candidates_per_round x tree.max_roots_per_prompt = "
            f"{prompts.candidates_per_round * tree.max_roots_per_prompt} can take; raise one of them",
        )
    if 0 < prompts.num_train < prompts.candidates_per_round:
        yield (
            "prompts.candidates_per_round",
            f"is {prompts.candidates_per_round}, more than prompts.num_train = {prompts.num_train} prompts; lower it",
        )
    if config.evaluation.num_prompts > prompts.num_heldout:
        yield (
            "evaluation.num_prompts",
            f"is {config.evaluation.num_prompts}, more than prompts.num_heldout = {prompts.num_heldout}; lower it",
        )


def _check_road(config: Config) -> Iterator[tuple[str, str]]:
    road = config.coordinator
    if road.soft_age_steps > road.max_age_steps:
        yield (
            "coordinator.soft_age_steps",
            f"is {road.soft_age_steps}, more than coordinator.max_age_steps = {road.max_age_steps}; lower it",
        )
    if road.dead_after_s < 2 * road.heartbeat_s:
        yield (
            "coordinator.dead_after_s",
            f"is {road.dead_after_s:g}, less than two heartbeats of {road.heartbeat_s:g} s: one late heartbeat would "
            "count as a death; raise it",
        )
    if road.lease_deadline_s <= config.engine.request_deadline_s:
        yield (
            "coordinator.lease_deadline_s",
            f"is {road.lease_deadline_s:g}, not more than engine.request_deadline_s = "
            f"{config.engine.request_deadline_s:g}: one slow turn would cost the whole tree; raise it",
        )
    yield from _check_listens("coordinator.address", road.address, schemes=("tcp", "ipc"), trusts=road.trust_network)
    if (address := config.publication.address) not in ("", "none"):
        yield from _check_listens("publication.address", address, schemes=("tcp",), trusts=road.trust_network)


def _check_listens(key: str, address: str, *, schemes: tuple[str, ...], trusts: bool) -> Iterator[tuple[str, str]]:
    """An address to listen at; `trusts`: it may be one that other machines reach."""
    url = urlsplit(address)
    if url.scheme not in schemes:
        forms = {"tcp": "tcp://HOST:PORT (port 0: any free one)", "ipc": "ipc://PATH"}
        yield key, f"is {address!r}: give {' or '.join(forms[scheme] for scheme in schemes)}"
    elif url.scheme == "tcp" and url.hostname not in _LOOPBACK and not trusts:
        yield (
            key,
            f"is {address!r}, which other machines reach, and what goes there is neither encrypted nor authenticated: "
            "on a network that you trust set coordinator.trust_network = true, elsewhere use tcp://127.0.0.1:PORT",
        )


def _check_sizes(config: Config) -> Iterator[tuple[str, str]]:
    tree = config.tree
    if config.engine.max_turn_tokens >= tree.max_context_tokens:
        yield (
            "engine.max_turn_tokens",
            f"is {config.engine.max_turn_tokens}, not less than tree.max_context_tokens = {tree.max_context_tokens}: "
            "no turn would fit beside the prompt; lower it",
        )
    if config.learner.micro_batch_tokens < tree.max_context_tokens:
        yield (
            "learner.micro_batch_tokens",
            f"is {config.learner.micro_batch_tokens}, less than tree.max_context_tokens = {tree.max_context_tokens}: "
            "a full path would not fit into one forward pass; raise it",
        )
    if not (config.evaluation.greedy or config.evaluation.sampled):
        yield "evaluation.sampled", "is false and so is evaluation.greedy: nothing would be measured; set one to true"


def _check_training(config: Config) -> Iterator[tuple[str, str]]:
    learner = config.learner
    if learner.schedule == "constant" and learner.decay_to != 1.0:
        yield (
            "learner.decay_to",
            f"is {learner.decay_to:g}, but learner.schedule = 'constant' never falls; remove it, or use 'linear' or "
            "'cosine'",
        )
    if learner.compute_dtype != "float32" and config.engine.dtype == "float32":
        yield (
            "learner.compute_dtype",
            f"is {learner.compute_dtype!r}, but engine.dtype = 'float32': what rounding does would look like a policy "
            "that has moved, and no engine could prove that it has the learner's weights; set engine.dtype = "
            f"{learner.compute_dtype!r} too",
        )
    if learner.processes > 1 and learner.device not in ("auto", "cpu", "cuda"):
        yield (
            "learner.device",
            f"is {learner.device!r}, but learner.processes = {learner.processes} need a device each; set it to auto, "
            "cuda (each process takes one of the machine's) or cpu",
        )


def _check_server(config: Config) -> Iterator[tuple[str, str]]:
    url, wanted = config.engine.server_url, config.engine.kind == "vllm_server"
    if not wanted and url:
        yield "engine.server_url", f"is {url!r}, but engine.kind = {config.engine.kind!r} uses no server; remove it"
    elif wanted and not _is_server_url(url):
        yield (
            "engine.server_url",
            f"is {url!r}: give http://HOST:PORT of a server that `trace-async vllm-server CONFIG` has started",
        )
    if wanted and config.actor.count > 1:
        yield (
            "actor.count",
            f"is {config.actor.count}, but each actor needs a vLLM server of its own and engine.server_url names one; "
            "set it to 1 and start the others with `trace-async actor RUN --server URL`",
        )


def _is_server_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        port = url.port  # raises ValueError for one that cannot be
    except ValueError:
        return False
    plain = not (url.username or url.query or url.fragment or url.path.strip("/"))
    return url.scheme in ("http", "https") and bool(url.hostname) and port is not None and plain
