"""Published weights as files: what is written is read, tied tensors once; additions are merged as peft merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trace_async.core.types import Adapter
from trace_async.errors import PolicyError
from trace_async.weights import check_names, find_aliases, read_weights, with_aliases, write_weights

ADAPTER = Adapter(rank=3, alpha=6.0)
TIED = "lm_head.weight"


def tiny_llama(*, tied: bool = True, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def peft_with_noise(folder: Path) -> Any:
    """A peft model on the folder's policy whose pairs are all far from their start."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=ADAPTER.rank, lora_alpha=6, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
def test_an_adapter_of_peft_is_merged_as_peft_merges_it(
    tied: bool, dtype: torch.dtype, shard: str, tmp_path: Path
) -> None:
    tiny_llama(tied=tied).to(dtype).save_pretrained(tmp_path / "base", max_shard_size=shard)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1 or shard == "1GB"
    model = peft_with_noise(tmp_path / "base")
    model.save_pretrained(tmp_path)
    expected = model.merge_and_unload().state_dict()
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    write_weights(tmp_path / "published", tensors, aliases=find_aliases(expected))
    found = read_weights(tmp_path / "published", adapter=ADAPTER, base=tmp_path / "base")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=0, atol=1e-6)
        assert tensor.dtype == (torch.float32 if "_proj" in name else dtype)


def test_what_is_tied_is_stored_once_and_read_under_both_names(tmp_path: Path) -> None:
    model = tiny_llama()
    state = model.state_dict()
    aliases = find_aliases(state)
    assert aliases == {TIED: "model.embed_tokens.weight"}
    write_weights(tmp_path / "w", {n: t for n, t in state.items() if n not in aliases}, aliases=aliases)
    assert TIED not in load_file(tmp_path / "w")
    found = read_weights(tmp_path / "w", adapter=None, base=tmp_path)
    check_names(found, model)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert found[TIED].data_ptr() == found["model.embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("kept", ["head", "embedding"])
def test_either_of_two_names_gives_the_other(kept: str) -> None:
    found = with_aliases({kept: torch.ones(2)}, {"head": "embedding"})
    assert found.keys() == {"head", "embedding"}


@given(
    shapes=st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(0, 4), max_size=3), min_size=1),
    data=st.data(),
)
def test_whatever_is_written_is_read_to_the_bit_and_equal_tensors_are_equal_bytes(
    shapes: dict[str, list[int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("w")
    kinds = data.draw(st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=6, max_size=6))
    tensors = {n: torch.randn(shape).to(kind) for (n, shape), kind in zip(shapes.items(), kinds, strict=False)}
    aliases = {f"{name}2": name for name in data.draw(st.sets(st.sampled_from(sorted(tensors))))}
    write_weights(folder / "one", tensors, aliases=aliases)
    shuffled = dict(data.draw(st.permutations(list(aliases.items()))))
    write_weights(folder / "two", tensors, aliases=shuffled)
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()
    found = read_weights(folder / "one", adapter=None, base=folder)
    assert found.keys() == tensors.keys() | aliases.keys()
    assert all(torch.equal(found[name], tensors[aliases.get(name, name)]) for name in found)


def test_views_of_one_storage_are_written_as_what_they_show(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"upper": whole[:2], "lower": whole[1:], "columns": whole.T}
    assert find_aliases(views) == {}
    write_weights(tmp_path / "w", views, aliases={})
    found = read_weights(tmp_path / "w", adapter=None, base=tmp_path)
    assert all(torch.equal(found[name], view) for name, view in views.items())


def test_a_retired_file_stays_readable_for_who_has_read_it(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", {"a": torch.arange(100_000.0)}, aliases={})
    found = read_weights(tmp_path / "w", adapter=None, base=tmp_path)
    (tmp_path / "w").unlink()
    assert float(found["a"].sum()) == float(torch.arange(100_000.0).sum())


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_a_file_that_was_cut_off_is_refused(length: int, tmp_path: Path) -> None:
    write_weights(tmp_path / "w", {"a": torch.ones(10)}, aliases={})
    data = (tmp_path / "w").read_bytes()
    (tmp_path / "w").write_bytes(data[:length])
    with pytest.raises(PolicyError, match="cannot be read as safetensors"):
        read_weights(tmp_path / "w", adapter=None, base=tmp_path)


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="gone"):
        read_weights(tmp_path / "gone", adapter=None, base=tmp_path)


def pair(module: str, *, rows: int = 16, columns: int = 16, rank: int = 3) -> dict[str, torch.Tensor]:
    name = f"base_model.model.{module}.lora"
    return {f"{name}_A.weight": torch.ones(rank, columns), f"{name}_B.weight": torch.ones(rows, rank)}


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({}, "does not hold pairs"),
        (pair(Q) | {"lm_head.weight": torch.ones(60, 16)}, "does not hold pairs"),
        (dict([*pair(Q).items()][:1]), "does not hold pairs"),
        (dict([*pair(Q).items()][1:]), "does not hold pairs"),
        (pair(Q, rank=2), "of rank 3 cannot be added"),
        (pair(Q, rows=8), "cannot be added"),
        (pair(Q, columns=8), "cannot be added"),
        (pair("model.layers.7.self_attn.q_proj"), r"not there.*same policy\.path"),
        (pair("model.norm"), "cannot be added"),
    ],
)
def test_pairs_that_do_not_fit_the_start_policy_are_refused(
    tensors: dict[str, torch.Tensor], complaint: str, tmp_path: Path
) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "w")
    with pytest.raises(PolicyError, match=complaint):
        read_weights(tmp_path / "w", adapter=ADAPTER, base=tmp_path)


def test_pairs_are_never_taken_for_a_whole_policy(tmp_path: Path) -> None:
    save_file(pair(Q), tmp_path / "w")
    with pytest.raises(PolicyError, match="not announced as an adapter"):
        read_weights(tmp_path / "w", adapter=None, base=tmp_path)


def test_pairs_without_a_start_policy_are_refused(tmp_path: Path) -> None:
    save_file(pair(Q), tmp_path / "w")
    with pytest.raises(PolicyError, match=r"model\.safetensors"):
        read_weights(tmp_path / "w", adapter=ADAPTER, base=tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "gone.safetensors"}}'])
def test_a_start_policy_with_a_damaged_index_is_refused(index: str, tmp_path: Path) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    save_file(pair(Q), tmp_path / "w")
    with pytest.raises(PolicyError, match=r"does not say which file|gone"):
        read_weights(tmp_path / "w", adapter=ADAPTER, base=tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"extra": torch.ones(1)}, "unexpected .'extra'"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight \[3\] instead of \[16\]"),
        ({}, "missing .'lm_head.weight'"),
    ],
)
def test_names_and_shapes_must_be_those_of_the_model(change: dict[str, torch.Tensor], complaint: str) -> None:
    model = tiny_llama()
    tensors = {**model.state_dict(), **change}
    if not change:
        del tensors[TIED]
    with pytest.raises(PolicyError, match=complaint):
        check_names(tensors, model)
