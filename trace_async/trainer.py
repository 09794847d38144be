"""The model being trained: one optimizer step from packed rows, checkpoints, and folders others can load.

Invariants
    - A step divides by a denominator it is given, never by what happened to be in a micro-batch.
    - Log-probabilities are of the same distribution that was sampled: after the engine's temperature, in float32,
      without dropout.
    - Packed trees are only for models that they leave unchanged (`packs_trees`, probed at the start); others, such as
      those with a sliding window shorter than a tree, get path rows.
    - Gradients that are not finite never reach the weights: the step is skipped and counted.
    - With `learner.lora_rank` only low-rank additions are trained, published and kept in checkpoints (`trainer_lora`).
    - Nothing on disk is a pickle: weights and optimizer state are safetensors, the rest JSON.

Never: sockets, groups, or the age of anything; `version` counts the optimizer steps the weights have had.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_async.config import LearnerConfig, ObjectiveConfig
from trace_async.core.packing import RowBatch
from trace_async.core.tree_packing import MAX_TREE_TOKENS, TreeBatch
from trace_async.core.types import Adapter, Canary, FloatArray, IntArray
from trace_async.devices import pick_device
from trace_async.errors import InvariantError, PolicyError
from trace_async.methods.objective import ObjectiveStats, finish_stats, merge_stats, to_tensors, tree_tis
from trace_async.model_probe import logits_agree, probe_tokens
from trace_async.trainer_lora import add_pairs, check_folder, merged_state, pairs
from trace_async.weights import check_fit, find_aliases, read_stored, with_aliases, write_weights

_LOG = logging.getLogger(__name__)
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "trainer.json"


class Trainer:
    """One replica on one device. Blocking; the learner calls it from a single worker thread."""

    def __init__(
        self,
        policy_path: Path,
        *,
        learner: LearnerConfig,
        objective: ObjectiveConfig,
        temperature: float,
        seed: int,
        publish_dtype: str = "float32",
    ) -> None:
        torch.set_num_threads(learner.threads)
        torch.manual_seed(seed)
        model = _load_model(policy_path)
        self._aliases = find_aliases(model.state_dict())
        self.adapter = Adapter(rank=learner.lora_rank, alpha=learner.lora_alpha) if learner.lora_rank else None
        if self.adapter is not None:
            check_folder(model, policy_path)
            add_pairs(model, adapter=self.adapter)
        # Gradients flow in evaluation mode too; in training mode dropout would train another policy than was sampled.
        self.model = model.to(pick_device(learner.device, key="learner.device")).eval()
        self.version = 0
        self._policy_path = policy_path
        self._learner = learner
        self._objective = objective
        self._temperature = temperature
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
        self.packs_trees = self._probe_trees(min(MAX_TREE_TOKENS, learner.micro_batch_tokens))

    def step(self, batches: Sequence[RowBatch], *, denominator: float) -> Mapping[str, float]:
        """One optimizer step on all micro-batches together; returns flat metrics (`actor/...`, `objective/...`).

        Without any row the weights stay as they are, but the version still counts up: the groups were consumed.
        """
        metrics = {"actor/lr": self._set_learning_rate(), "actor/loss_tokens": 0.0, "actor/rows": 0.0}
        parts: list[ObjectiveStats] = []
        loss_sum = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            loss, stats = tree_tis(self._logprobs(batch), to_tensors(batch, self._device), self._objective)
            (loss / denominator).backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            parts.append(stats)
            metrics["actor/loss_tokens"] += batch.num_loss_tokens
            metrics["actor/rows"] += batch.token_ids.shape[0]
        if parts:
            metrics |= finish_stats(merge_stats(parts))
            metrics["actor/pg_loss"] = loss_sum / denominator
            metrics["actor/grad_norm"] = self._apply_gradients()
        metrics["actor/skipped_steps"] = float(self._skipped_steps)
        self.version += 1
        return metrics

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _logprobs(self, batch: RowBatch) -> torch.Tensor:
        """float32 [B, T]: log-probability of the token at each position; position 0 has none and holds 0."""
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        on = torch.from_numpy(batch.loss_mask).to(self._device)
        # Only positions with loss pay for the vocabulary in float32.
        chosen = torch.log_softmax(self._predicting_logits(batch, token_ids, on).float() / self._temperature, dim=-1)
        picked = chosen.gather(-1, token_ids[on][:, None])[:, 0]
        out = torch.zeros(token_ids.shape, dtype=torch.float32, device=self._device)
        return out.masked_scatter(on, picked)

    def _predicting_logits(self, batch: RowBatch, token_ids: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        """[tokens with loss, vocabulary]: the logits that predict them, rows first."""
        if not isinstance(batch, TreeBatch):
            attention = torch.from_numpy(batch.attention_mask).to(self._device)
            logits: torch.Tensor = self.model(input_ids=token_ids, attention_mask=attention).logits
            return logits[:, :-1][on[:, 1:]]
        logits = self._tree_logits(token_ids, batch.visible, batch.positions)
        rows, columns = on.nonzero(as_tuple=True)
        return logits[rows, torch.from_numpy(batch.predecessor).to(self._device)[rows, columns]]

    def _tree_logits(
        self, token_ids: torch.Tensor, visible: NDArray[np.bool_], positions: NDArray[np.int64]
    ) -> torch.Tensor:
        """[B, T, vocabulary] where `visible` [B, T, T] says what each token may attend to."""
        logits: torch.Tensor = self.model(
            input_ids=token_ids,
            attention_mask=torch.from_numpy(visible).to(self._device)[:, None],
            position_ids=torch.from_numpy(positions).to(self._device),
        ).logits
        return logits

    @torch.no_grad()
    def _probe_trees(self, max_tokens: int) -> bool:
        """Whether two branches on one stem, packed as trees are, get the logits that each path has by itself."""
        limit = min(max_tokens, int(getattr(self.model.config, "max_position_embeddings", max_tokens)))
        path = probe_tokens(self.model.config, limit=limit)
        stem, length = len(path) - 2, len(path) + 2
        other = [*path[:stem], *path[:2]]
        visible = np.tri(length, dtype=np.bool_)
        visible[stem + 2 :, stem : stem + 2] = False
        positions = np.r_[:stem, stem : stem + 2, stem : stem + 2]
        packed = torch.tensor([path + other[stem:]], device=self._device)
        try:
            trees = self._tree_logits(packed, visible[None], positions[None])[0]
        except (RuntimeError, TypeError, ValueError) as error:  # no mask per pair of tokens, or no positions
            _LOG.warning("%s takes no packed trees (%s); path rows are used", type(self.model).__name__, error)
            return False
        alone = [
            self.model(input_ids=torch.tensor([tokens], device=self._device)).logits[0] for tokens in (path, other)
        ]
        same = logits_agree(trees[stem + 1], alone[0][-1]) and logits_agree(trees[-1], alone[1][-1])
        if not same:
            _LOG.warning("packed trees change what %s predicts; path rows are used", type(self.model).__name__)
        return same

    def _set_learning_rate(self) -> float:
        rise = min(1.0, (self.version + 1) / self._learner.warmup_steps) if self._learner.warmup_steps else 1.0
        done = min(1.0, self.version / self._learner.max_steps)
        rate = self._learner.learning_rate * rise * (1.0 + (self._learner.decay_to - 1.0) * done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _apply_gradients(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._learner.max_grad_norm))
        if math.isfinite(norm):
            self._optimizer.step()
        else:
            self._skipped_steps += 1
            _LOG.warning("version %d: gradient norm %s; the step is skipped", self.version, norm)
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
        ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self._device)
        logprobs = torch.log_softmax(self.model(input_ids=ids[None]).logits[0, :-1].float(), dim=-1)
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
        write_weights(path, stored, aliases=self._aliases)

    def save(self, directory: Path) -> None:
        """Everything a resumed run needs of the trainer beside the start policy, into an existing folder."""
        write_weights(directory / _MODEL, self._stored(), aliases=self._aliases)
        moments = {}
        for index, parameter in enumerate(self._trained):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                moments[f"{index}.{name}"] = value
        write_weights(directory / _OPTIMIZER, moments, aliases={})
        state = {"version": self.version, "skipped_steps": self._skipped_steps}
        (directory / _STATE).write_text(json.dumps(state))

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Continue exactly where `save` stood. Raises PolicyError when the tensors are not this trainer's."""
        own, found = self._stored(), read_stored(directory / _MODEL)
        try:
            check_fit(found, own)
        except PolicyError as error:
            raise PolicyError(
                f"checkpoint {directory} belongs to another model or learner.lora_rank: {error}"
            ) from error
        for name, tensor in own.items():
            tensor.copy_(found[name])
        moments = read_stored(directory / _OPTIMIZER)
        self._optimizer.state.clear()
        for index, parameter in enumerate(self._trained):
            kept = {k.split(".", 1)[1]: v for k, v in moments.items() if k.split(".", 1)[0] == str(index)}
            if kept:  # AdamW keeps the moments beside the parameter and its step count on the CPU
                self._optimizer.state[parameter] = {
                    name: value.to("cpu" if name == "step" else parameter.device, copy=True)
                    for name, value in kept.items()
                }
        state = json.loads((directory / _STATE).read_text())
        self.version, self._skipped_steps = int(state["version"]), int(state["skipped_steps"])

    def export(self, directory: Path) -> None:
        """A standard transformers folder: config, weights with what was added to them, tokenizer with its template."""
        directory.mkdir(parents=True, exist_ok=True)
        model: Any = self.model
        if self.adapter is not None:
            model = _load_model(self._policy_path)
            model.load_state_dict(with_aliases(merged_state(self.model), self._aliases))
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(self._policy_path, local_files_only=True).save_pretrained(directory)

    def _stored(self) -> dict[str, torch.Tensor]:
        """The tensors that change, each once, under the names that files give them; not copies."""
        if self.adapter is not None:
            return pairs(self.model)
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self._aliases}


def _load_model(policy_path: Path) -> torch.nn.Module:
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            policy_path,
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation="sdpa",  # takes a mask per pair of tokens, which packed trees need
        )
    except (OSError, ValueError) as error:
        raise PolicyError(f"{policy_path} holds no transformers model: {error}") from error
    return model
