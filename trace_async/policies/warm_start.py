"""Supervised learning of a policy on recorded conversations, before reinforcement learning starts.

The loss is the cross-entropy of the assistant's tokens, averaged over them. Tokens come from the same renderer that
the rollouts use, so the policy meets in reinforcement learning exactly the sequences it was warmed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from trace_async.core.packing import RowBatch
from trace_async.core.types import Message
from trace_async.policies.warm_start_packing import Encoded, num_said, pack_conversations, pad_conversations
from trace_async.rendering import Renderer
from trace_async.trainer_scoring import Scorer

OnStep: TypeAlias = Callable[[int, float], None]
"""Told the number of steps made and the loss of the last one in nats."""


class Conversation(NamedTuple):
    """An opening, then (assistant text, reply text) turns; the last reply is not used."""

    opening: tuple[Message, ...]
    turns: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    steps: int = 600
    conversations_per_step: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


def encode(conversation: Conversation, *, renderer: Renderer, answer_ids: Callable[[str], list[int]]) -> Encoded:
    """Token ids, and which of them the assistant said."""
    ids = renderer.opening_ids(conversation.opening).tolist()
    said = [False] * len(ids)
    for index, (answer, reply) in enumerate(conversation.turns):
        tokens = [*answer_ids(answer), renderer.stop_ids[0]]
        ids += tokens
        said += [True] * len(tokens)
        if index + 1 < len(conversation.turns):
            observation = renderer.reply_ids((Message("user", reply),), closed=True).tolist()
            ids += observation
            said += [False] * len(observation)
    return Encoded(ids, said)


def warm_start(
    model: torch.nn.Module,
    conversations: Iterator[tuple[list[int], list[bool]]],
    *,
    pad_id: int,
    config: WarmStartConfig,
    on_step: OnStep,
) -> None:
    """Train a tiny `model` in place: all of a step's conversations are one padded batch, with all its logits."""

    def backward() -> float:
        batch = [next(conversations) for _ in range(config.conversations_per_step)]
        loss = _loss(model, batch, pad_id=pad_id)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    _train(model.train(), backward, config=config, on_step=on_step)


def warm_start_packed(
    model: torch.nn.Module,
    batches: Iterator[Sequence[Encoded]],
    *,
    pad_id: int,
    micro_batch_tokens: int,
    max_path_tokens: int,
    config: WarmStartConfig,
    on_step: OnStep,
) -> None:
    """Train `model` in place, a batch a step, with at most `micro_batch_tokens` in one forward pass.

    Openings that a batch shares are computed once and nothing is padded, where the model's attention takes packed
    trees on paths of up to `max_path_tokens`, which no conversation may exceed. `model` is float32 and stays in
    evaluation mode. Raises ValueError for a conversation over `micro_batch_tokens`.
    """
    scorer = Scorer(model.eval(), temperature=1.0)
    packs_trees = scorer.probe_trees(max_path_tokens)

    def pack(batch: Sequence[Encoded]) -> list[RowBatch]:
        if packs_trees:
            return pack_conversations(batch, bound=micro_batch_tokens)
        return pad_conversations(batch, bound=micro_batch_tokens, pad_id=pad_id)

    def backward() -> float:
        batch = next(batches)
        total, tokens = 0.0, num_said(batch)
        for rows in pack(batch):
            loss = -scorer.logprobs(rows).sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    _train(model, backward, config=config, on_step=on_step)


def _train(model: torch.nn.Module, backward: Callable[[], float], *, config: WarmStartConfig, on_step: OnStep) -> None:
    """`backward` adds the gradient of one step's loss and returns the loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    for step in range(config.steps):
        for group in optimizer.param_groups:
            rise = min(1.0, (step + 1) / config.warmup_steps)
            group["lr"] = config.learning_rate * rise * (1.0 - step / config.steps)
        optimizer.zero_grad()
        loss = backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        on_step(step + 1, loss)
    model.eval()


def _loss(model: torch.nn.Module, batch: Sequence[tuple[list[int], list[bool]]], *, pad_id: int) -> torch.Tensor:
    longest = max(len(ids) for ids, _ in batch)
    tokens = torch.full((len(batch), longest), pad_id, dtype=torch.long)
    said = torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, (ids, mask) in enumerate(batch):
        tokens[row, : len(ids)] = torch.tensor(ids)
        said[row, : len(mask)] = torch.tensor(mask)
    # Padding stands at the right, where causal attention cannot look back to it.
    logits = model(input_ids=tokens[:, :-1]).logits[said[:, 1:]]
    return torch.nn.functional.cross_entropy(logits.float(), tokens[:, 1:][said[:, 1:]])
