"""A version's way into a paused vLLM server, and the proof that it acts; what it means for answers is the fence's.

Never: waits for requests, or cleans up after a failure.
"""

from __future__ import annotations

from pathlib import Path

from trace_async.canary import check_canary
from trace_async.engines.vllm_common import Load
from trace_async.engines.vllm_server_answer import read_scored, score_body
from trace_async.engines.vllm_server_http import ServerGone, VllmHttp
from trace_async.errors import EngineError, PolicyError


class RefusedWeights(PolicyError):
    """No worker took the file over: the server's weights are what they were."""


async def take_over(http: VllmHttp, load: Load, *, base: Path) -> None:
    """New weights, no key/values, new label; then the server samples again.

    Raises RefusedWeights; whatever else it raises leaves a server that holds nobody knows what.
    """
    refusals = await http.load_version(_arguments(load, base))
    if all(refusals):
        raise RefusedWeights(f"version {load.version} is refused by the vLLM server: {refusals[0]}")
    if any(refusals):
        raise EngineError(f"version {load.version}: some of vLLM's workers took it over, some did not: {refusals}")
    await http.reset_prefix_cache()
    await http.set_label(load.label)
    await http.resume()


async def prove(http: VllmHttp, load: Load, *, dtype: str, salt: str) -> None:
    """Score the canary's prompts, one after the other, beside whatever goes on under the new weights.

    Raises PolicyError when the canary does not agree, ServerGone when other weights than these scored it.
    """
    found = []
    for prompt in load.canary.prompts:
        scores, labels = read_scored(await http.score(score_body(prompt, salt=salt)), prompt)
        if labels != {load.label}:
            raise ServerGone(f"{http.url} scored the canary of {load.label} with weights {sorted(labels)}")
        found.append(scores)
    check_canary(load.canary, found, dtype=dtype, version=load.version)


def _arguments(load: Load, base: Path) -> dict[str, str]:
    """Of `WorkerExtension.load_version`; over HTTP all are text. The server sees the same files by the same paths."""
    paths = {"weights": str(load.weights.absolute()), "base": str(base.absolute())}
    if load.adapter is None:
        return paths
    return {**paths, "adapter_rank": str(load.adapter.rank), "adapter_alpha": repr(load.adapter.alpha)}
