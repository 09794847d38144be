"""TRACE, GRPO and Tree-GRPO on multi-hop questions of a generated world, at equal sampled tokens.

    python -m benchmarks.study_multihop [--methods grpo trace ...] [--seeds N] [--jobs 2] [--json]

The policy and the world of configs/multihop_tiny.toml. Besides held-out questions, which are about other entities of
the same world, the start and the end policy play questions of a new world. How runs are made: `study_run`.
"""

from __future__ import annotations

from benchmarks.study_run import Method, Study, main_of

TOKENS = 60_000

CHAINS, TREES = 56, 24
"""Root rollouts of a step, of chains and of trees with two continuations each: about the same tokens, so that at equal
tokens every method makes about the same number of steps."""

COMMON: dict[str, object] = {
    "learner.max_sampled_tokens": TOKENS,
    "learner.max_steps": 1000,
    "learner.checkpoint_every_steps": 10,
    "learner.keep_checkpoints": 1000,
    "evaluation.num_prompts": 0,  # checkpoints are evaluated afterwards, on the same questions for every run
}

METHODS: dict[str, Method] = {
    "grpo": Method(
        label="GRPO",
        config="multihop_tiny",
        seeds=5,
        overrides={
            "tree.root_allocator": "even",
            "tree.allocator": "uniform",
            "tree.roots_per_step": CHAINS,
            "tree.continuations_per_root": 0,
            "tree.max_roots_per_prompt": 8,
            "learner.credit": "flat",
        },
    ),
    "tree_grpo": Method(
        label="Tree-GRPO",
        config="multihop_tiny",
        seeds=5,
        overrides={
            "tree.root_allocator": "even",
            "tree.allocator": "random",
            "tree.roots_per_step": TREES,
            "tree.max_roots_per_prompt": 2,
            "learner.credit": "tree_grpo",
        },
    ),
    "trace": Method(label="TRACE", config="multihop_tiny", seeds=5, overrides={"tree.roots_per_step": TREES}),
}

STUDY = Study(
    stem="multihop",
    title="success on held-out questions",
    methods=METHODS,
    common=COMMON,
    tokens=TOKENS,
    level=0.4,
    heldout=400,
    between=120,
    also=("new_world",),
)

if __name__ == "__main__":
    main_of(STUDY, __doc__)
