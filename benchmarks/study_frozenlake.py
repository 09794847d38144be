"""TRACE and its peers on FrozenLake at equal sampled tokens: effective ratio, held-out success, calibration, ages.

    python -m benchmarks.study_frozenlake [--methods grpo trace ...] [--seeds N] [--jobs 2] [--json]

Two thirds of the maps are so large that the start policy hardly ever reaches the goal; independent chains spend their
budget mostly there. How runs are made: `study_run`.
"""

from __future__ import annotations

from benchmarks.study_run import Method, Study, main_of

TOKENS = 24_000
"""Sampled tokens of every run, shared prefixes once."""

COMMON: dict[str, object] = {
    "environment.options.sizes": [3, 4, 5, 7, 7, 7, 7, 7, 7],
    "environment.options.min_moves_per_size": 1.0,
    "prompts.num_train": 1024,
    "prompts.num_heldout": 1024,
    "prompts.candidates_per_round": 256,
    "learner.max_sampled_tokens": TOKENS,
    "learner.max_steps": 1000,
    "learner.checkpoint_every_steps": 20,
    "learner.keep_checkpoints": 1000,
    "evaluation.num_prompts": 0,  # checkpoints are evaluated afterwards, on the same maps for every run
}

CHAINS, TREES = 56, 24
"""Root rollouts of a step, of chains and of trees with two continuations each: about the same tokens, so that at equal
tokens every method makes about the same number of steps."""


def _chains(label: str, config: str, *, seeds: int = 3) -> Method:
    return Method(label=label, config=config, seeds=seeds, overrides={"tree.roots_per_step": CHAINS})


def _trees(label: str, config: str, *, seeds: int = 3, **overrides: object) -> Method:
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return Method(label=label, config=config, seeds=seeds, overrides={"tree.roots_per_step": TREES, **named})


def _trace(label: str, *, seeds: int = 3, **overrides: object) -> Method:
    return _trees(label, "trace", seeds=seeds, **overrides)


METHODS: dict[str, Method] = {
    "grpo": _chains("GRPO", "grpo", seeds=5),
    "mopps": _chains("MoPPS", "mopps", seeds=5),
    "tree_grpo": _trees("Tree-GRPO", "tree_grpo", seeds=5),
    "treepo": _trees("TreePO", "treepo", seeds=5),
    "trace": _trace("TRACE", seeds=5),
    "trace_root": _trace("TRACE roots only", tree__allocator="random"),
    "trace_prefix": _trace("TRACE prefixes only", tree__root_allocator="even"),
    "random_tree": _trees(
        "random tree",
        "quickstart",
        tree__allocator="random",
        tree__root_allocator="even",
    ),
    "trace_beta": _trees("TRACE, beta", "quickstart"),
    "trace_joint": _trace("TRACE, joint", tree__options__mode="joint"),
    "trace_sibling": _trace("TRACE, plain sibling credit", learner__credit="sibling"),
    "trace_12_6": _trace("TRACE, M=12 N=6", tree__roots_per_step=12, tree__continuations_per_root=6),
    "trace_48_2": _trace("TRACE, M=48 N=2", tree__roots_per_step=48),
}

STUDY = Study(
    stem="frozenlake",
    title="success on held-out maps",
    methods=METHODS,
    common=COMMON,
    tokens=TOKENS,
    level=0.08,
    heldout=1024,
    between=256,
)

if __name__ == "__main__":
    main_of(STUDY, __doc__)
