"""The model being trained: optimizer steps from packed minibatches, checkpoints, and folders others can load.

Invariants
    - An update divides by a denominator that what was played fixes, never by what happened to be in a batch of rows.
    - Log-probabilities are of the same distribution that was sampled (`trainer_scoring`).
    - Gradients that are not finite never reach the weights: the update is skipped and counted.
    - With several ranks (`trainer_ranks`) every method but `version` and `adapter` is called on all of them in the same
      order with the same arguments; the leader alone touches files.
    - With `learner.lora_rank` only low-rank additions are trained, published and kept in checkpoints (`trainer_lora`).

Never: sockets, groups, or the age of anything; `version` counts the training steps the weights have had.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from trace_async.config import LearnerConfig, ObjectiveConfig
from trace_async.core.packing import Minibatch
from trace_async.core.types import Adapter, Canary, FloatArray, IntArray
from trace_async.devices import pick_device
from trace_async.errors import InvariantError
from trace_async.methods.objectives.measures import ObjectiveStats, finish_stats, merge_stats
from trace_async.methods.objectives.registry import ChosenObjective
from trace_async.trainer_files import (
    empty_moments,
    export_policy,
    load_model,
    moments_of,
    read_moments,
    read_tensors,
    read_trainer_state,
    save_trainer,
    set_generator,
    tell_generator,
)
from trace_async.trainer_layers import compute_in, recompute_activations, shard
from trace_async.trainer_lora import add_pairs, check_folder, pairs
from trace_async.trainer_ranks import ALONE, Ranks, whole_tensor
from trace_async.trainer_schedule import ess_factor, scheduled_rate
from trace_async.trainer_scoring import Scorer
from trace_async.trainer_update import accumulate, score_all
from trace_async.weights import find_aliases, write_weights

_LOG = logging.getLogger(__name__)


class _Update(NamedTuple):
    loss: float
    norm: float  # of the gradient, before clipping
    rate: float  # learning rate
    ess_factor: float  # that is in it
    stats: ObjectiveStats


class Trainer:
    """One replica on one device, or this rank's share of it. Blocking; called from a single worker thread."""

    def __init__(
        self,
        policy_path: Path,
        *,
        learner: LearnerConfig,
        objective: ObjectiveConfig,
        temperature: float,
        seed: int,
        publish_dtype: str = "float32",
        max_path_tokens: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`max_path_tokens`: no path is longer (None: than a batch), so a sliding window that is not matters not."""
        torch.set_num_threads(learner.threads)
        torch.manual_seed(seed)
        model = load_model(policy_path)
        self._aliases = find_aliases(model.state_dict())
        self.adapter = Adapter(rank=learner.lora_rank, alpha=learner.lora_alpha) if learner.lora_rank else None
        if self.adapter is not None:
            check_folder(model, policy_path)
            add_pairs(model, adapter=self.adapter)
        if ranks.alone:  # else each layer moves when it is sharded, since no device may hold all of them
            model.to(pick_device(learner.device, key="learner.device"))
        # Gradients flow in evaluation mode too; in training mode dropout would train another policy than was sampled.
        self.model = model.eval()
        self.version = 0
        self._ranks = ranks
        self._policy_path = policy_path
        self._learner = learner
        self._objective = ChosenObjective(objective)
        # Probes compare two ways of computing the same, so they come before anything rounds.
        self._scorer = Scorer(self.model, temperature=temperature)
        self.packs_trees = self._scorer.probe_trees(max_path_tokens or learner.micro_batch_tokens)
        _prepare_layers(self.model, learner, ranks)
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype)
        self._skipped_steps = 0
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=learner.learning_rate,
            betas=(learner.adam_beta1, learner.adam_beta2),
            eps=learner.adam_eps,
            weight_decay=learner.weight_decay,
        )

    def step(self, minibatches: Sequence[Minibatch]) -> Mapping[str, float]:
        """One training step, an optimizer update per minibatch; returns flat metrics (`actor/...`, `objective/...`).

        Without any row the weights stay as they are, but the version still counts up: the groups were consumed.
        """
        filled = [minibatch for minibatch in minibatches if minibatch.rows]
        updates = self._update_all(filled)
        metrics = {"actor/lr": _mean([update.rate for update in updates]) if updates else self._scheduled_rate()}
        metrics["actor/loss_tokens"] = float(sum(int(part.turns.tokens[part.turns.trained].sum()) for part in filled))
        metrics["actor/rows"] = float(sum(batch.token_ids.shape[0] for part in filled for batch in part.rows))
        if updates:
            metrics |= finish_stats(merge_stats([update.stats for update in updates]))
            metrics["actor/pg_loss"] = _mean([update.loss for update in updates])
            metrics["actor/grad_norm"] = _mean([update.norm for update in updates])
            metrics["actor/ess_factor"] = _mean([update.ess_factor for update in updates])
        metrics["actor/skipped_steps"] = float(self._skipped_steps)
        self.version += 1
        return metrics

    def _update_all(self, filled: Sequence[Minibatch]) -> list[_Update]:
        before = [
            score_all(part, self._scorer, self._ranks) if self._objective.needs_proximal else None for part in filled
        ]
        return [self._update(part, proximal) for part, proximal in zip(filled, before, strict=True)]

    def _update(self, minibatch: Minibatch, proximal: torch.Tensor | None) -> _Update:
        self._optimizer.zero_grad(set_to_none=True)
        seen = accumulate(
            minibatch, scorer=self._scorer, objective=self._objective, proximal=proximal, ranks=self._ranks
        )
        factor = ess_factor(seen.stats.weights.tolist()) if self._learner.ess_scaled else 1.0
        rate = self._scheduled_rate() * factor
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return _Update(seen.loss, self._apply_gradients(), rate, factor, seen.stats)

    def _scheduled_rate(self) -> float:
        return scheduled_rate(self._learner, step=self.version)

    def _apply_gradients(self) -> float:
        norm = float(whole_tensor(torch.nn.utils.clip_grad_norm_(self._trained, self._learner.max_grad_norm)))
        if math.isfinite(norm):
            self._optimizer.step()
        else:
            self._skipped_steps += 1
            _LOG.warning("version %d: gradient norm %s; the update is skipped", self.version, norm)
        return norm

    @torch.no_grad()
    def canary(self, prompts: Sequence[IntArray]) -> Canary:
        """What the weights of now say of each prompt, int32 [L] with L >= 2: float32 [L - 1], at temperature 1.

        One prompt after the other, by plain forward passes. Raises ValueError for shorter prompts, and InvariantError
        when the weights give no finite numbers any more: then no engine could prove anything.
        """
        short = [len(prompt) for prompt in prompts if len(prompt) < 2]
        if short:
            raise ValueError(f"canary prompts need at least 2 tokens, got {short}")
        logprobs = tuple(self._plain_logprobs(prompt) for prompt in prompts)
        broken = [index for index, found in enumerate(logprobs) if not np.isfinite(found).all()]
        if broken:
            raise InvariantError(
                f"version {self.version}: the log-probabilities of canary prompts {broken} are not finite; the weights "
                "have diverged, start again from a checkpoint with a lower learner.learning_rate"
            )
        return Canary(prompts=tuple(prompts), logprobs=logprobs)

    def _plain_logprobs(self, token_ids: IntArray) -> FloatArray:
        ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self._scorer.device)
        logprobs = torch.log_softmax(self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float(), dim=-1)
        found: FloatArray = logprobs.gather(-1, ids[1:, None])[:, 0].cpu().numpy()
        return found

    # ---- files -------------------------------------------------------------------------------------------------------

    def save_weights(self, path: Path) -> None:
        """What actors need of the weights, for `weights.read_weights`: all of them, or with an adapter only its pairs.

        Matrices are rounded to `publish_dtype` here rather than in every engine, which gives the same numbers. What
        has one dimension stays float32: it weighs next to nothing, and some models compute with it in float32.
        """
        stored = self._stored()
        if self.adapter is None:
            stored = {name: t.to(self._publish_dtype) if t.ndim > 1 else t for name, t in stored.items()}
        stored = self._ranks.gather(stored)
        if self._ranks.leads:
            write_weights(path, stored, aliases=self._aliases)

    def save(self, directory: Path) -> None:
        """Everything a resumed run needs of the trainer beside the start policy, into an existing folder.

        Files hold whole tensors, so any number of ranks can go on from them.
        """
        tensors = self._ranks.gather(self._stored())
        moments = self._ranks.gather(moments_of(self._optimizer, self._trained))
        if self._ranks.leads:
            state = {"version": self.version, "skipped_steps": self._skipped_steps, "generator": tell_generator()}
            save_trainer(directory, tensors=tensors, aliases=self._aliases, moments=moments, state=state)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Continue exactly where `save` stood. Raises PolicyError when the tensors are not this trainer's."""
        own, found, moments, state = self._stored(), {}, {}, {}
        if self._ranks.leads:
            found, moments = read_tensors(directory, own), read_moments(directory)
            state = read_trainer_state(directory)
        self._ranks.scatter(found, own)
        names, state = self._ranks.agree([sorted(moments), state])
        self._ranks.scatter(moments, empty_moments(self._optimizer, self._trained, names))
        self.version, self._skipped_steps = int(state["version"]), int(state["skipped_steps"])
        set_generator(state["generator"])

    def export(self, directory: Path) -> None:
        """A standard transformers folder: config, weights with what was added to them, tokenizer with its template."""
        stored = self._ranks.gather(self._stored())
        if self._ranks.leads:
            export_policy(directory, policy_path=self._policy_path, stored=stored, adapter=self.adapter)

    def _stored(self) -> dict[str, torch.Tensor]:
        """The tensors that change, each once, under the names that files give them; not copies."""
        if self.adapter is not None:
            return pairs(self.model)
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self._aliases}


def _prepare_layers(model: torch.nn.Module, learner: LearnerConfig, ranks: Ranks) -> None:
    dtype: torch.dtype = getattr(torch, learner.compute_dtype)
    if ranks.alone and dtype is not torch.float32:
        compute_in(model, dtype)
    if learner.activation_checkpointing:
        recompute_activations(model)
    if not ranks.alone:
        shard(model, mesh=ranks.mesh, dtype=dtype)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
