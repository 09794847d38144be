"""Log-probabilities of packed tokens under the model being trained, with gradient.

Invariants
    - They are of the same distribution that was sampled: after the engine's temperature, in float32, without dropout.
    - Logits exist for scored tokens only, a chunk at a time (`trainer_head`), where the model allows it; a probe at the
      start compares with the model's own logits, and others give all of them.
    - Packed trees are only for models that they leave unchanged (`probe_trees`); others, such as those with a sliding
      window shorter than a path, get path rows.

Never: losses, optimizers, files.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trace_async.core.packing import RowBatch
from trace_async.core.tree_packing import TreeBatch
from trace_async.model_probe import logits_agree, probe_tokens
from trace_async.trainer_attention import leave_tree_attention, make_plan, use_tree_attention
from trace_async.trainer_head import ChunkedHead, Wanted

_LOG = logging.getLogger(__name__)
_PROBE_TOKENS = 16


class Scorer:
    """Runs one model, on its device."""

    def __init__(self, model: torch.nn.Module, *, temperature: float, chunks_head: bool = True) -> None:
        self._model = model
        self._temperature = temperature
        head = ChunkedHead(model, temperature=temperature)
        self._head = head if chunks_head and head.usable and self._head_agrees(head) else None

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return next(self._model.parameters()).device

    @property
    def chunks_head(self) -> bool:
        """Whether logits of tokens that are not scored are never computed."""
        return self._head is not None

    def logprobs(self, batch: RowBatch) -> Tensor:
        """float32 [n]: the scored tokens of the batch, row by row."""
        wanted, inputs = self._wanted(batch), self._inputs(batch)
        if self._head is not None:
            with self._head.answering(wanted):
                found: Tensor = self._model(**inputs).logits
            return found
        logits = self._model(**inputs).logits.flatten(0, -2)[wanted.places]
        return _chosen(logits, wanted.targets, self._temperature)

    def _wanted(self, batch: RowBatch) -> Wanted:
        rows, columns = np.nonzero(batch.scored)
        above = batch.predecessor[rows, columns] if isinstance(batch, TreeBatch) else columns - 1
        places = torch.from_numpy(rows * batch.token_ids.shape[1] + above)
        targets = torch.from_numpy(batch.token_ids[rows, columns])
        return Wanted(places.to(self.device), targets.to(self.device))

    def _inputs(self, batch: RowBatch) -> dict[str, Any]:
        token_ids = torch.from_numpy(batch.token_ids).to(self.device)
        if not isinstance(batch, TreeBatch):
            return {
                "input_ids": token_ids,
                "attention_mask": torch.from_numpy(batch.attention_mask).to(self.device),
                "use_cache": False,
            }
        return {
            "input_ids": token_ids,
            # A mask of four dimensions is handed on as it is; without one, the model would make one of all pairs.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device),
            "position_ids": torch.from_numpy(batch.positions).to(self.device),
            "tree": make_plan(batch, self.device),
            "use_cache": False,
        }

    @torch.no_grad()
    def _head_agrees(self, head: ChunkedHead) -> bool:
        """Whether log-probabilities from hidden states are those of the model's own logits."""
        path = torch.tensor([probe_tokens(self._model.config, limit=_PROBE_TOKENS)], device=self.device)
        wanted = Wanted(torch.arange(path.shape[1] - 1, device=self.device), path[0, 1:])
        expected = _chosen(
            self._model(input_ids=path, use_cache=False).logits[0, :-1], wanted.targets, self._temperature
        )
        with head.answering(wanted):
            found = self._model(input_ids=path, use_cache=False).logits
        same = found.shape == expected.shape and logits_agree(found, expected)
        if not same:
            _LOG.warning("%s changes logits after its last layer; all of them are computed", type(self._model).__name__)
        return same

    @torch.no_grad()
    def probe_trees(self, max_tokens: int) -> bool:
        """Whether two branches on one stem, packed as trees are, get the logits that each path has by itself.

        Paths are at most `max_tokens` long. Where they do, the model's attention knows trees from now on.
        """
        model = self._model
        if not use_tree_attention(model):
            _LOG.warning("the attention of %s is not sdpa; path rows are used", type(model).__name__)
            return False
        limit = min(max_tokens, int(getattr(model.config, "max_position_embeddings", max_tokens)))
        path = probe_tokens(model.config, limit=limit)
        forked = _fork(path)
        alone = [model(input_ids=torch.tensor([tokens], device=self.device)).logits[0] for tokens in forked.paths]
        try:
            trees = model(**self._inputs(forked.batch)).logits[0]
        except (RuntimeError, TypeError, ValueError) as error:  # attention that packed trees cannot do, or no positions
            _LOG.warning("%s takes no packed trees (%s); path rows are used", type(model).__name__, error)
            leave_tree_attention(model)
            return False
        same = all(logits_agree(trees[place], logits[-1]) for place, logits in zip(forked.ends, alone, strict=True))
        if not same:
            _LOG.warning("packed trees change what %s predicts; path rows are used", type(model).__name__)
            leave_tree_attention(model)
        return same


class _Forked(NamedTuple):
    batch: TreeBatch
    paths: tuple[list[int], list[int]]
    ends: tuple[int, int]  # where the paths end in the row


def _fork(path: list[int]) -> _Forked:
    """The path, and one that leaves it two tokens before its end."""
    stem, length = len(path) - 2, len(path) + 2
    other = [*path[:stem], *path[:2]]
    end = np.full(length, length)
    end[stem : stem + 2] = stem + 2
    batch = TreeBatch(
        token_ids=np.array([path + other[stem:]], np.int64),
        attention_mask=np.ones((1, length), np.bool_),
        token_index=np.full((1, length), -1, np.int64),
        num_trees=1,
        whole=True,
        positions=np.r_[:stem, stem : stem + 2, stem : stem + 2][None],
        predecessor=np.r_[0, : stem + 1, stem - 1, stem + 2][None],
        subtree_end=end[None],
    )
    return _Forked(batch, (path, other), (stem + 1, length - 1))


def _chosen(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """float32 [n] from [n, vocabulary]."""
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, targets[:, None])[:, 0]
