"""What runs inside vLLM's worker processes: the taking over of a published version's weights.

vLLM mixes `WorkerExtension` into its worker class and lets the engine call its methods; arguments and results are
plain values, because they cross processes and, with a server, HTTP. Imports vllm where it is used only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_async.core.types import Adapter
from trace_async.errors import PolicyError
from trace_async.weights import check_fit, find_aliases, read_folder, read_weights, with_aliases


class WorkerExtension:
    """Methods that vLLM's `collective_rpc` can call; `self` is the worker."""

    model_runner: Any
    reload_weights: Any
    vllm_config: Any

    def served_settings(self) -> dict[str, str]:
        """Of vLLM's settings those that matter to whoever samples here and did not start this process, as text."""
        model = self.vllm_config.model_config
        names = (
            "logprobs_mode",
            "generation_config",
            "dtype",
            "max_model_len",
            "logits_processors",
            "skip_tokenizer_init",
        )
        return {name: str(getattr(model, name)) for name in names}

    def load_version(self, weights: str, base: str, adapter_rank: int = 0, adapter_alpha: float = 0.0) -> str:
        """Copy the weights of a published file into the model: "" when done, or why the file was refused.

        `weights`: the safetensors file; `base`: the start policy's folder; `adapter_rank` 0: the file holds the full
        weights. Numbers may come as strings. A refusal leaves the weights as they were; whatever is raised leaves them
        half copied. Generation must be paused meanwhile, and key/values must be thrown away.
        """
        rank = int(adapter_rank)
        adapter = Adapter(rank=rank, alpha=float(adapter_alpha)) if rank else None
        try:
            tensors = read_weights(Path(weights), adapter=adapter, base=Path(base))
            # vLLM only warns of a tensor that is missing, and finds another shape when others are copied already.
            own = with_aliases(read_folder(Path(base)), find_aliases(tensors))
            check_fit(tensors, own)
        except PolicyError as error:
            return str(error)
        self.reload_weights(weights_iterator=iter(tensors.items()))
        repack_heads(self.model_runner.get_model())
        return ""


def repack_heads(model: Any) -> None:
    """Have every output head take over its weights once more.

    vLLM's CPU build packs a head's matrix when it is loaded. A head that is tied to the embedding is not loaded again
    by `reload_weights`, so it would go on with the old packed matrix, without an error (seen in 0.32). Packing twice
    does no harm, and on a GPU there is nothing to pack.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
