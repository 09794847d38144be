"""The configuration: one frozen tree, read once from TOML. Unknown keys are errors; derived numbers are properties.

Importable without torch. A component receives its own section, never the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trace_async.core.types import SUCCESS_ABOVE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    name: str = "run"  # shown in the display and told to every actor
    dir: str = "runs/run"  # the run folder: everything the run writes
    seed: int = 0  # all sampling and shuffling derives from it


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    name: str = "frozenlake"  # a name in envs/registry.py, or "package.module:function"
    options: dict[str, Any] = field(default_factory=dict)  # checked by the environment itself
    success_above: float = SUCCESS_ABOVE  # outcomes above are successes; graded ones may need another; docs/metrics.md
    step_deadline_s: float = 30.0  # for one reset, step or fork; missing it fails the node


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    path: str = "builtin:frozenlake-tiny"  # a transformers folder, a hub id, or a policy shipped with the package


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    kind: str = "local"  # in the actor process: "local" (transformers) or "vllm"; outside: "vllm_server"
    dtype: str = "float32"  # of weights and key/values: "float32" or "bfloat16"; log-probabilities are always float32
    server_url: str = ""  # kind "vllm_server": http://HOST:PORT, one server for each actor
    options: dict[str, Any] = field(default_factory=dict)  # both kinds of vLLM: further engine arguments of vLLM
    on_update: str = "drain"  # requests in flight at a version change: "drain" or "continue"
    max_batch: int = 64  # requests per forward pass
    max_turn_tokens: int = 4  # sampled tokens of one turn
    temperature: float = 1.0  # log-probabilities are those after the temperature
    device: str = "auto"  # "auto": the first CUDA device, or the CPU; or a torch device such as "cuda:1"
    threads: int = 1  # torch threads of an actor process
    request_deadline_s: float = 60.0  # for one turn's sampling; missing it fails the node
    prefix_cache_bytes: int = 256 * 1024 * 1024  # key/values of earlier prefixes kept for their continuations


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    allocator: str = "trace"  # who grows where inside a tree; see methods/allocators.py
    options: dict[str, Any] = field(default_factory=dict)  # the allocator's own
    root_allocator: str = "trace"  # which prompts get how many roots; see methods/root_allocators.py
    root_options: dict[str, Any] = field(default_factory=dict)  # the root allocator's own
    roots_per_step: int = 64  # M, root rollouts consumed per optimizer step
    continuations_per_root: int = 2  # N
    max_roots_per_prompt: int = 8  # root rollouts one tree may get in a round
    max_turns: int = 64  # per rollout, on top of the environment's own limit
    in_order: bool = False  # one turn of a tree at a time: what grows where does not depend on timing; docs/resume.md
    max_context_tokens: int = 256  # prompt and turns of one path


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    num_train: int = 1024  # size of the training pool; 0 = unlimited
    candidates_per_round: int = 128  # pool over which one round's roots are allocated; "even" draws what it needs
    num_heldout: int = 512  # size of the pool that evaluation draws from; never trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    kind: str = "beta"  # "beta", "hashed" or "embedding"; see docs/predictor.md
    options: dict[str, Any] = field(default_factory=dict)  # the predictor's own
    max_batch: int = 256  # prefixes scored in one call, at most; a predictor may want fewer
    deadline_s: float = 10.0  # for one score; missing it fails the node


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    address: str = "tcp://127.0.0.1:0"  # port 0: any free port, written to the run folder
    trust_network: bool = False  # lets the address be one that other machines reach; the road is not encrypted
    max_age_steps: int = 4  # hard bound on a trained turn's age
    soft_age_steps: int = 2  # older turns are trained under a tighter cap
    lockstep: bool = False  # nothing depends on timing: every turn is trained at age max_age_steps; docs/resume.md
    lease_deadline_s: float = 120.0  # a lease not finished by then is leased again
    max_attempts: int = 3  # issues of one lease before it is rejected
    heartbeat_s: float = 1.0  # how often an actor reports and is told the newest version
    dead_after_s: float = 10.0  # silence after which the other end counts as gone


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationConfig:
    directory: str = ""  # where versions are written; "": RUN/versions; on one host /dev/shm/NAME keeps them in memory
    address: str = ""  # where the weight server listens; "": any free port beside coordinator.address; "none": nowhere
    keep_versions: int = 3  # published versions kept at most, for actors that are behind


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    count: int = 1  # actor processes that `trace-async train` starts; 0: all are started elsewhere
    max_live_roots: int = 128  # root rollouts one actor holds at a time
    drain_s: float = 10.0  # how long a stopping actor may finish its live trees


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    max_steps: int = 60  # optimizer steps of the run
    max_sampled_tokens: int = 0  # stop when this many tokens were trained on; 0 = no such limit
    learning_rate: float = 1e-4  # AdamW, reached after the warm-up
    schedule: str = "linear"  # how it falls from the first step to the last: "constant", "linear" or "cosine"
    decay_to: float = 1.0  # share of the learning rate that is left at the last step
    ess_scaled: bool = False  # brake: times sqrt(ESS / turns) of each update, for data that is old; docs/learner.md
    adam_beta1: float = 0.9  # decay of the gradient's mean
    # 0.95 forgets rare large gradients so fast that words which are hardly ever sampled drift upwards
    adam_beta2: float = 0.999  # decay of the gradient's square
    adam_eps: float = 1e-8  # added to the root of that square
    weight_decay: float = 0.0  # AdamW's, on matrices
    warmup_steps: int = 0  # steps of linear rise to the learning rate
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    updates_per_step: int = 1  # optimizer updates of one step, each on an equal share of its groups
    micro_batch_tokens: int = 8192  # rows x longest row of one forward pass
    compute_dtype: str = "float32"  # of the decoder layers; weights, their updates and the output head stay float32
    activation_checkpointing: bool = False  # keep only each layer's input for the backward pass: less memory, more time
    device: str = "auto"  # as engine.device
    threads: int = 1  # torch threads of each learner process
    processes: int = 1  # that share the training, each with a device of its own; under torchrun, as many as it says
    rank_deadline_s: float = 300.0  # one that lets the others wait longer in the middle of a step has failed
    checkpoint_every_steps: int = 20  # one more is made at the end
    keep_checkpoints: int = 2  # newest ones kept, any of which a resumed run can start from; older ones are deleted
    keep_best: bool = True  # and keep one more: that before which sampled rollouts succeeded most; docs/resume.md
    lora_rank: int = 0  # train and publish low-rank additions of this rank to all linear layers; 0: all weights
    lora_alpha: float = 32.0  # the additions are scaled by lora_alpha / lora_rank
    credit: str = "sibling_shrunk"  # docs/credit.md says what each rule does


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    kind: str = "tree_tis"  # docs/objectives.md says what each does
    options: dict[str, Any] = field(default_factory=dict)  # the kind's own
    proximal: str = "behaviour"  # what clipped ratios are taken to: "behaviour", "recomputed" or "interpolated"
    cap_positive: float = 5.0  # C0 for advantages > 0
    cap_negative: float = 2.0  # C0 for advantages < 0 at age 0; 1 at any other age
    cap_decay: float = 0.7  # g: C(s) = 1 + (C0 - 1) g^s
    veto_low: float = 0.5  # a turn whose geometric ratio leaves [low, high] gets no loss
    veto_high: float = 2.0  # the upper end of that range
    veto_token: float = 1e-4  # nor one with a token ratio below this
    m2_budget: float = 0.04  # brake of tree_tis and icepop: furthest tokens lose their gradient; 0: off


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    num_prompts: int = 512  # held-out tasks played before and after; 0 = none
    greedy: bool = True  # play them with the most likely tokens
    sampled: bool = True  # play them with sampled tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree."""

    run: RunConfig = field(default_factory=RunConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    publication: PublicationConfig = field(default_factory=PublicationConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def max_permits(self) -> int:
        """Root rollouts that may be issued and not yet consumed: (max_age_steps + 1) rounds."""
        return (self.coordinator.max_age_steps + 1) * self.tree.roots_per_step
