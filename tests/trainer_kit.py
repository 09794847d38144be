"""Groups to train on, small decoders, and the loss and log-probabilities that a plain forward pass gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.builders import random_group
from trace_async.config import ObjectiveConfig
from trace_async.core.group import paths, turn_spans
from trace_async.core.packing import Minibatch, PackItem, RowBatch, denominators, first_tokens, pack
from trace_async.core.rows import scored_turns
from trace_async.core.staleness import ages, judge_turns
from trace_async.core.turn_table import make_table
from trace_async.core.types import FloatArray, Group, IntArray
from trace_async.methods.credit import sibling_credit

Layout: TypeAlias = Callable[..., list[RowBatch]]
OPEN_OBJECTIVE = ObjectiveConfig(
    cap_positive=1e6, cap_negative=1e6, cap_decay=1.0, veto_low=0, veto_high=1e30, veto_token=0, m2_budget=0
)


def items(seed: int, count: int = 4) -> list[PackItem]:
    rng = np.random.default_rng(seed)
    made: list[PackItem] = []
    while len(made) < count:
        group = random_group(rng)
        credit = sibling_credit(group)
        age = ages(group, trainer_version=6, trainer_epoch=group.epoch)
        item = PackItem(group=group, credit=credit, verdicts=judge_turns(age, soft=50, hard=100), ages=age)
        if scored_turns(item).any():
            made.append(item)
    return made


def minibatch(
    packed: Sequence[PackItem], *, layout: Layout = pack, micro_batch_tokens: int = 4096, **options: int
) -> Minibatch:
    """One update's worth of items, all of which have turns to train."""
    rows = layout(packed, first_tokens=first_tokens(packed), micro_batch_tokens=micro_batch_tokens, **options)
    return Minibatch(turns=make_table(packed), rows=rows, denominators=denominators(packed))


def slow_loss(model: Callable[[torch.Tensor], Any], item: PackItem, temperature: float) -> torch.Tensor:
    """Each turn by itself behind its whole prefix: -mass * advantage * sum of min(cap, ratio) * log-probability."""
    group, total = item.group, torch.zeros(())
    for turn, prefix, action in turns_of(group):
        logits = model(torch.tensor([[*prefix, *action]])).logits[0].float() / temperature
        own = torch.log_softmax(logits, -1)[len(prefix) - 1 : -1]
        logprobs = own.gather(-1, torch.tensor(action)[:, None])[:, 0]
        start = int(turn_spans(group).logprob_start[turn])
        behaviour = torch.from_numpy(group.logprobs[start : start + len(action)].copy())
        weight = float(item.credit.mass[turn]) * float(item.credit.advantage[turn])
        total = total - weight * (torch.exp(logprobs.detach() - behaviour) * logprobs).sum()
    return total


def turns_of(group: Group) -> list[tuple[int, list[int], list[int]]]:
    spans, found = turn_spans(group), {}
    for path in paths(group):
        prefix = group.prompt_ids.tolist()
        for turn in path:
            action = group.token_ids[spans.start[turn] : spans.action_end[turn]].tolist()
            if action:
                found[turn] = (turn, list(prefix), action)
            prefix += group.token_ids[spans.start[turn] : spans.end[turn]].tolist()
    return list(found.values())


COMMON: dict[str, Any] = {
    "vocab_size": 220,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def decoder(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2 with dropout":
        rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
        config = GPT2Config(vocab_size=220, n_positions=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
        config.update(rates)
        return GPT2LMHeadModel(config)
    if kind == "qwen3 with tied embeddings":
        return Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=True, initializer_range=0.2))
    window, spread = {"mistral": (None, 0.2), "window of 8": (8, 0.2), "new window of 8": (8, 0.02)}[kind]
    return MistralForCausalLM(MistralConfig(**COMMON, sliding_window=window, initializer_range=spread))


def plain_logprobs(model: Callable[[torch.Tensor], Any], prompt: IntArray) -> FloatArray:
    ids = torch.from_numpy(prompt.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
    return np.asarray([float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids))], np.float32)
