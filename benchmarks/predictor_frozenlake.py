"""Do predictors of success earn their keep? Constant, beta, hashed (and embedding) on the same FrozenLake trees.

    python -m benchmarks.predictor_frozenlake [--folder runs/predictor] [--embedding MODEL_FOLDER]
        [--out docs/results/predictor_frozenlake.json] [--plot docs/results/predictor_frozenlake.png] [--json]

Trees come round by round (see `predictor_trees`). Before a round's outcomes are shown to it, every predictor says what
it expects of each prompt and of each prefix that goes on; then it observes the round. Scores are of single rollouts:
those that started at the prompt, or the ends below the prefix. `constant` says the success rate of all root rollouts so
far. Rounds before `--first` are learned from and not scored. The interval of a difference is a bootstrap over prompts.
`embedding` reads the prompts only, not the prefixes: on a CPU those would take it most of an hour.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from benchmarks.predictor_trees import Plan, grown, make_renderer
from trace_async.core.outcomes import is_success
from trace_async.core.types import FloatArray, Group, NodeState, Prefix
from trace_async.methods.calibration import brier, ece, log_loss, reliability, spearman
from trace_async.predictors.counts import prompt_rollouts
from trace_async.predictors.embedding import EmbeddingOptions, VectorRows
from trace_async.predictors.encoder import SentenceEncoder
from trace_async.predictors.learned import LearnedPredictor
from trace_async.predictors.protocol import Predictor, TextOf
from trace_async.predictors.registry import make_predictor
from trace_async.predictors.rows import Row
from trace_async.predictors.targets import tree_targets

NEW, SEEN, PREFIX = "prompts never seen before", "prompts seen before", "prefixes"
KINDS = (NEW, SEEN, PREFIX)
BINS = 10
MIN_ROLLOUTS = 50
"""Of a bin that is drawn."""
DRAWS = 2000
"""Of the bootstrap."""

Floats = NDArray[np.float64]


class Constant:
    """The success rate of all root rollouts so far."""

    def __init__(self) -> None:
        self._seen = np.ones(2)  # successes and failures, one of each to begin with

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        return np.full(len(prefixes), self._seen[0] / self._seen.sum(), np.float32)

    def observe(self, groups: Sequence[Group]) -> None:
        for group in groups:
            own = own_outcomes(group)
            self._seen += (own.sum(), own.size - own.sum())


class Forecast(NamedTuple):
    """One prediction and what then happened."""

    kind: str
    round_index: int
    prompt_id: str
    predicted: float
    successes: int
    rollouts: int


def own_outcomes(group: Group) -> Floats:
    """0 or 1 of every rollout that started at the prompt."""
    ends = [one.end for one in prompt_rollouts(group) if group.state[one.end] == NodeState.LEAF]
    return np.asarray(is_success(group.outcome[ends], group.success_above), np.float64)


def forecast(predictor: Constant | Predictor, rounds: Sequence[Sequence[Group]]) -> list[Forecast]:
    """Every round predicted, then observed."""
    found: list[Forecast] = []
    seen: set[str] = set()
    for index, groups in enumerate(rounds):
        for group in groups:
            targets = tree_targets(group)
            said = predictor.predict([target.prefix for target in targets]).tolist()
            own = own_outcomes(group)
            kind = SEEN if group.prompt_id in seen else NEW
            for target, predicted in zip(targets, said, strict=True):
                if target.prefix.turn_index == 0:
                    known = (kind, index, group.prompt_id, predicted, int(own.sum()), own.size)
                else:
                    successes = round(target.value * target.leaves)
                    known = (PREFIX, index, group.prompt_id, predicted, successes, target.leaves)
                found.append(Forecast(*known))
        predictor.observe(groups)
        seen |= {group.prompt_id for group in groups}
    return found


def pairs(forecasts: Sequence[Forecast]) -> tuple[Floats, Floats]:
    """Prediction and outcome of every single rollout."""
    predicted = np.repeat([one.predicted for one in forecasts], [one.rollouts for one in forecasts])
    happened = [np.arange(one.rollouts) < one.successes for one in forecasts]
    return predicted, np.concatenate([np.zeros(0, np.bool_), *happened]).astype(np.float64)


def scores(forecasts: Sequence[Forecast]) -> dict[str, float]:
    """How good, over single rollouts; the rank correlation is with success rates."""
    predicted, happened = pairs(forecasts)
    rates = [one.successes / one.rollouts for one in forecasts]
    return {
        "forecasts": len(forecasts),
        "rollouts": len(happened),
        "brier": round(brier(predicted, happened), 5),
        "log_loss": round(log_loss(predicted, happened), 5),
        "ece": round(ece(predicted, happened, bins=BINS), 4),
        "spearman": round(spearman([one.predicted for one in forecasts], rates), 4),
    }


def gain(better: Sequence[Forecast], worse: Sequence[Forecast]) -> list[float]:
    """Brier of `worse` minus that of `better`, with its 95 % interval from a bootstrap over prompts."""
    names = sorted({one.prompt_id for one in better})
    place = {name: number for number, name in enumerate(names)}
    sums = np.zeros((len(names), 2))  # squared error saved, rollouts
    for first, second in zip(better, worse, strict=True):
        errors = [
            one.successes * (1.0 - one.predicted) ** 2 + (one.rollouts - one.successes) * one.predicted**2
            for one in (first, second)
        ]
        sums[place[first.prompt_id]] += (errors[1] - errors[0], first.rollouts)
    rng = np.random.default_rng(0)
    drawn = sums[rng.integers(0, len(names), (DRAWS, len(names)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return [round(float(value), 5) for value in (sums[:, 0].sum() / sums[:, 1].sum(), low, high)]


class PromptVectors(VectorRows):
    """Encodes prompts; every longer prefix is the same to it."""

    def make(self, prefixes: Sequence[Prefix]) -> list[Row]:
        nothing = np.zeros(self.layer.width, np.float16)
        return [nothing if prefix.turn_index else super(PromptVectors, self).make([prefix])[0] for prefix in prefixes]


def make_prompt_embedding(folder: Path, text_of: TextOf) -> Predictor:
    """`embedding` for prompts alone."""
    encoder = SentenceEncoder(folder, where="--embedding")
    rows = PromptVectors(encoder, text_of=text_of, cache=8192)
    return LearnedPredictor(EmbeddingOptions(path=str(folder)), kind="embedding", rows=rows, seed=0)


def makers(plan: Plan, embedding: Path | None) -> dict[str, Callable[[], Constant | Predictor]]:
    """Predictors by name, untrained."""
    text_of = make_renderer(plan).text

    def maker(kind: str, options: dict[str, Any]) -> Callable[[], Predictor]:
        return lambda: make_predictor(kind, options, seed=0, text_of=text_of)

    found: dict[str, Callable[[], Constant | Predictor]] = {
        "constant": Constant,
        "beta": maker("beta", {}),
        "hashed": maker("hashed", {}),
        "hashed, log loss": maker("hashed", {"loss": "log"}),
    }
    if embedding is not None:
        found["embedding"] = lambda: make_prompt_embedding(embedding, text_of)
    return found


def plot(said: dict[str, list[Forecast]], first: int, path: Path) -> None:
    """Reliability on new prompts and on prefixes, and how the error on new prompts falls."""
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2))
    names = [name for name in said if "log" not in name]
    colours = dict(zip(names, ("tab:gray", "tab:blue", "tab:red", "tab:green"), strict=False))
    for axis, kind in zip(axes, (NEW, PREFIX), strict=False):
        axis.plot((0, 1), (0, 1), color="black", linewidth=0.8, linestyle=":")
        for name in names if kind == NEW else names[:3]:
            table = reliability(*pairs([f for f in said[name] if f.kind == kind and f.round_index >= first]), bins=BINS)
            full = table[table[:, 0] >= MIN_ROLLOUTS]
            axis.plot(full[:, 1] / full[:, 0], full[:, 2] / full[:, 0], "o-", color=colours[name], label=name)
        axis.set(title=kind, xlabel="predicted success", ylabel="what happened", xlim=(0, 0.9), ylim=(0, 0.9))
    for name in names:
        rounds = sorted({one.round_index for one in said[name]})
        by_round = [brier(*pairs([f for f in said[name] if f.kind == NEW and f.round_index == r])) for r in rounds]
        smooth = [np.mean(by_round[max(0, end - 8) : end]) for end in range(1, len(by_round) + 1)]
        axes[2].plot(rounds, smooth, color=colours[name], label=name)
    axes[2].axvline(first - 0.5, color="black", linewidth=0.8, linestyle=":")
    axes[2].set(title=f"Brier score, {NEW}", xlabel="round (mean of the last 8)")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/predictor"), help="keeps the trees")
    parser.add_argument("--first", type=int, default=10, help="first round that is scored")
    parser.add_argument("--embedding", type=Path, help="folder of a sentence encoder; slow on a CPU")
    parser.add_argument("--out", type=Path, default=Path("docs/results/predictor_frozenlake.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/results/predictor_frozenlake.png"))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    plan = Plan()
    rounds = grown(plan, args.folder)
    said = {name: forecast(make(), rounds) for name, make in makers(plan, args.embedding).items()}
    late = {
        name: {kind: [f for f in all_of if f.kind == kind and f.round_index >= args.first] for kind in KINDS}
        for name, all_of in said.items()
    }
    told_of = {name: KINDS[:2] if name == "embedding" else KINDS for name in said}
    table = {name: {kind: scores(late[name][kind]) for kind in told_of[name]} for name in said}
    gains = {
        f"{name} over {other}": {kind: gain(late[name][kind], late[other][kind]) for kind in told_of[name]}
        for name, other in (("beta", "constant"), ("hashed", "constant"), ("hashed", "beta"), ("embedding", "beta"))
        if name in said
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    told = {"plan": asdict(plan), "first_round": args.first, "scores": table, "brier_gain": gains}
    args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    plot(said, args.first, args.plot)
    for kind in KINDS:
        print(kind)  # noqa: T201
        for name in (name for name in said if kind in table[name]):
            print(f"  {name:18} " + "  ".join(f"{key} {value:g}" for key, value in table[name][kind].items()))  # noqa: T201
    for name, kinds in gains.items():
        print(f"Brier gained by {name}: " + "; ".join(f"{k} {v[0]} [{v[1]}, {v[2]}]" for k, v in kinds.items()))  # noqa: T201
    if args.json:
        print(json.dumps({"hashed_over_beta_new_prompts": gains["hashed over beta"][NEW]}))  # noqa: T201


if __name__ == "__main__":
    main()
