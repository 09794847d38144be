"""The plan's arithmetic against the real thing: models on the meta device, a trainer's tensors, files, key/values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.trainer_kit import items, minibatch
from trace_async.app.plan_files import file_sizes
from trace_async.app.plan_inputs import find_shape
from trace_async.app.plan_memory import kept_token_bytes, learner_memory, local_memory, vllm_memory
from trace_async.app.plan_sizes import PUBLISHED, ModelShape, Tensor, count, published_name, published_shape, read_shape
from trace_async.config import Config, EngineConfig, LearnerConfig, ObjectiveConfig, PolicyConfig
from trace_async.core.packing import RowBatch
from trace_async.core.tree_packing import pack_trees
from trace_async.core.types import Canary
from trace_async.engines.arenas import Arenas, Shape
from trace_async.engines.prefix_cache import PrefixCache
from trace_async.errors import ConfigError
from trace_async.policies.tiny import save_policy, tiny_tokenizer
from trace_async.publication.store import VersionStore
from trace_async.trainer import Trainer
from trace_async.trainer_layers import compute_in, recompute_activations
from trace_async.trainer_scoring import Scorer

TOTALS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
}
"""As the models' authors and hubs give them."""

SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 161,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KINDS = {
    "llama": LlamaConfig(**SMALL, head_dim=24, attention_bias=True, mlp_bias=True),
    "llama tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3 tied": Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=True),
}


def shape_of(config: Any) -> ModelShape:
    return read_shape(json.loads(config.to_json_string(use_diff=False)), source="config.json")


def made(config: Any, **options: Any) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, **options)


def on_meta(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = made(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# ---- sizes ---------------------------------------------------------------------------------------------------------


def test_every_published_model_has_its_known_number_of_parameters() -> None:
    assert {name: published_shape(name).parameters for name in PUBLISHED} == TOTALS


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-14B", "Qwen2.5-7B", "Qwen2.5-3B", "SmolLM2-135M", "Llama-3.2-1B"])
def test_a_published_model_has_the_tensors_that_transformers_makes_of_its_sizes(name: str) -> None:
    shape = published_shape(name)
    config = AutoConfig.for_model(
        shape.kind,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.positions,
    )
    assert list(shape.tensors()) == list(on_meta(config).items())
    assert read_shape(json.loads(config.to_json_string(use_diff=False)), source="x") == shape


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_read_from_a_config_are_those_of_the_model(kind: str) -> None:
    assert list(shape_of(KINDS[kind]).tensors()) == list(on_meta(KINDS[kind]).items())


def test_hub_ids_are_known_by_their_last_part_whether_base_or_tuned() -> None:
    known = {
        "Qwen/Qwen3-8B": "Qwen3-8B",
        "Qwen/Qwen3-8B-Base": "Qwen3-8B",
        "Qwen/Qwen3-4B-Instruct-2507": "Qwen3-4B",
        "models/SmolLM2-135M-Instruct/": "SmolLM2-135M",
        "someone/Qwen3-8B-GGUF": None,
        "Qwen/Qwen3-235B-A22B": None,
    }
    assert {name: published_name(name) for name in known} == known


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": "llama"}, "num_attention_heads must be a positive integer, got None"),
        ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
    ],
)
def test_a_config_that_says_no_sizes_is_refused_with_what_is_missing(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_shape(table, source="config.json")


@given(rows=st.integers(1, 40), ranks=st.integers(1, 9))
def test_a_share_is_the_largest_part_that_the_first_dimension_is_cut_into(rows: int, ranks: int) -> None:
    largest = max(len(part) * 3 for part in torch.empty(rows, 3).chunk(ranks))
    assert Tensor("w", (rows, 3)).share(ranks) == largest


# ---- a trainer's memory and files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["shipped", "tied 5M"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "shipped":
        return "builtin:frozenlake-tiny"
    path = tmp_path_factory.mktemp("policy")
    tokenizer = tiny_tokenizer([f"w{index}" for index in range(200)])
    sizes = {"hidden_size": 256, "intermediate_size": 684, "num_hidden_layers": 6, "vocab_size": len(tokenizer)}
    model = made(LlamaConfig(**{**SMALL, **sizes}, tie_word_embeddings=True))
    save_policy(model, tokenizer, path)
    return str(path)


def own_config(policy: str, *, rank: int = 0, dtype: str = "float32") -> Config:
    return Config(
        policy=PolicyConfig(path=policy),
        learner=LearnerConfig(lora_rank=rank, device="cpu", checkpoint_every_steps=1, max_steps=1),
        engine=EngineConfig(dtype=dtype),
    )


def trained(config: Config) -> Trainer:
    from trace_async.app.wiring import policy_path

    trainer = Trainer(
        policy_path(config.policy.path),
        learner=config.learner,
        objective=ObjectiveConfig(),
        temperature=1.0,
        seed=0,
        publish_dtype=config.engine.dtype,
    )
    trainer.step([minibatch(items(0), layout=pack_trees)])
    return trainer


@pytest.mark.parametrize("rank", [0, 4])
def test_standing_memory_is_what_a_trainer_holds_to_the_byte(policy: str, rank: int) -> None:
    config = own_config(policy, rank=rank)
    trainer = trained(config)
    parameters = list(trainer.model.parameters())
    moments = [value for state in trainer._optimizer.state.values() for name, value in state.items() if name != "step"]
    held = [
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        sum(moment.nbytes for moment in moments),
    ]
    _, _, shape = find_shape(config, None)
    planned = learner_memory(shape, config.learner, ranks=1, tokens=64).standing
    assert [part.num_bytes for part in planned] == held


@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (0, "bfloat16"), (4, "bfloat16")])
def test_published_and_saved_files_have_the_planned_size_to_the_byte(
    policy: str, rank: int, dtype: str, tmp_path: Path
) -> None:
    config = own_config(policy, rank=rank, dtype=dtype)
    trainer = trained(config)
    with VersionStore(tmp_path / "versions") as store:
        prompt = np.arange(1, 9, dtype=np.int32)
        canary = Canary(prompts=(prompt,), logprobs=(np.zeros(7, np.float32),))
        adapter = trainer.adapter
        store.publish(version=1, epoch=0, write=trainer.save_weights, predictor={}, canary=canary, adapter=adapter)
    (manifest,) = (tmp_path / "versions").glob("*.manifest.json")
    weights = json.loads(manifest.read_text())["weights"]
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint")
    saved = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.safetensors"))
    sizes = file_sizes(config, find_shape(config, None)[2])
    assert (sizes.version, sizes.checkpoint) == (weights["num_bytes"], saved)
    trainer.export(tmp_path / "policy")
    exported = (tmp_path / "policy" / "model.safetensors").stat().st_size
    assert sizes.policy == pytest.approx(exported, abs=200)  # transformers writes other metadata


# ---- what a pass keeps ---------------------------------------------------------------------------------------------


def kept(model: Any, scorer: Scorer, batch: RowBatch) -> int:
    """Bytes of distinct tensors that a forward pass keeps, weights not counted."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scorer.logprobs(batch)
    return sum(storages.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama tied", "qwen2", "qwen3 tied"])
def test_a_pass_keeps_the_planned_bytes_of_each_token(kind: str, dtype: str, checkpointing: bool) -> None:
    learner = LearnerConfig(compute_dtype=dtype, activation_checkpointing=checkpointing)
    model = made(KINDS[kind], attn_implementation="sdpa").eval()
    scorer = Scorer(model, temperature=1.0)
    assert scorer.probe_trees(256)
    if dtype == "bfloat16":
        compute_in(model, torch.bfloat16)
    if checkpointing:
        recompute_activations(model)
    few, many = (minibatch(items(1, n), layout=pack_trees, micro_batch_tokens=40_000).rows[0] for n in (4, 24))
    shape = shape_of(KINDS[kind])
    more_tokens = many.token_ids.size - few.token_ids.size
    more_scored = int(many.scored.sum()) - int(few.scored.sum())
    grown = kept(model, scorer, many) - kept(model, scorer, few) - more_scored * (4 * shape.hidden + 20)
    # angles are handed to every layer beside what autograd keeps; sums of short attention blocks are padded
    angles = 2 * 4 * shape.head_dim
    planned = kept_token_bytes(shape, learner, ranks=1)
    assert planned - angles - 8 <= grown / more_tokens <= planned + 8


def test_checkpointing_over_several_processes_keeps_rounded_inputs() -> None:
    """H = 64, head_dim 24, three layers: 2 H and rounded angles a layer, and 8 + 8 H + 4 + 8 x 24 beside."""
    learner = LearnerConfig(compute_dtype="bfloat16", activation_checkpointing=True)
    shape = shape_of(KINDS["qwen3 tied"])
    assert kept_token_bytes(shape, learner, ranks=2) == 3 * (2 * 64 + 4 * 24) + (8 + 8 * 64 + 4 + 8 * 24)
    assert kept_token_bytes(shape, learner, ranks=1) == 3 * 4 * 64 + (8 + 8 * 64 + 4 + 8 * 24)


# ---- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_values_are_those_that_the_local_engine_counts(dtype: torch.dtype) -> None:
    shape = shape_of(KINDS["qwen3 tied"])
    own = Shape(shape.layers, shape.kv_heads, shape.head_dim, dtype, torch.device("cpu"))
    token = shape.kv_token_bytes(dtype.itemsize)
    assert token == own.token_bytes
    cache = PrefixCache(max_bytes=1 << 20)
    cache.store(range(10), torch.zeros(shape.layers, 2, shape.kv_heads, 10, shape.head_dim, dtype=dtype))
    assert cache.num_bytes == 10 * token
    engine = EngineConfig(max_batch=5, prefix_cache_bytes=1000, dtype=str(dtype).removeprefix("torch."))
    running = Arenas(own, max_rows=5, max_tokens=32).max_bytes
    planned = local_memory(shape, engine, max_context_tokens=32)
    assert (planned.kv_bytes, planned.weights) == (running + 1000, dtype.itemsize * shape.parameters)


def test_an_engine_on_a_gpu_has_room_for_as_many_contexts_as_its_share_leaves() -> None:
    """Qwen3-8B: 2 x 36 layers x 8 heads x 128 x 2 bytes = 147,456 a token; a context of 100 takes 7 blocks of 16."""
    shape = published_shape("Qwen3-8B")
    engine = EngineConfig(kind="vllm", dtype="bfloat16", options={"gpu_memory_utilization": 0.5})
    planned = vllm_memory(shape, engine, shards=1, gpu_bytes=80 << 30)
    assert planned.kv_token_bytes == 147_456
    assert planned.kv_bytes == (40 << 30) - 2 * TOTALS["Qwen3-8B"] - (4 << 30)
    assert planned.contexts(100) == planned.kv_bytes // (147_456 * 112)
    halved = vllm_memory(shape, engine, shards=2, gpu_bytes=80 << 30)
    assert (halved.kv_token_bytes, halved.weights) == (147_456 // 2, TOTALS["Qwen3-8B"])
    assert shape.kv_token_bytes(2, shards=16) == shape.kv_token_bytes(2, shards=8)  # a head is not cut


def test_ranks_share_what_stands_and_gather_what_they_compute_with() -> None:
    """Qwen3-8B on four: 4, 4 and 8 bytes of a quarter; the root whole; three rounded layers and a layer's gradients."""
    shape = published_shape("Qwen3-8B")
    learner = LearnerConfig(compute_dtype="bfloat16", activation_checkpointing=True)
    planned = learner_memory(shape, learner, ranks=4, tokens=16_384)
    assert [part.num_bytes for part in planned.standing] == [TOTALS["Qwen3-8B"] * n // 4 for n in (4, 4, 8)]
    parts = {part.what: part.num_bytes for part in planned.passing}
    assert parts["embedding, last norm and head, gathered in float32"] == 4 * (2 * 151_936 * 4_096 + 4_096)
    assert parts["whole layers gathered, and a layer's gradients"] == (3 * 2 + 2 + 8) * count(shape.layer())
    assert parts["two chunks of logits"] == 2 * 4 * 64 * 151_936
    assert planned.peak == sum(part.num_bytes for part in (*planned.standing, *planned.passing))
