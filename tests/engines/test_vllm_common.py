"""What both vLLM engines share: labels, sampling parameters, stamps from spans, refusals. Needs no vLLM."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.app.checks import check_parts
from trace_async.config import Config, EngineConfig
from trace_async.core.types import GenerateRequest, StopReason
from trace_async.engines.vllm_common import (
    GREEDY_TEMPERATURE,
    OWN_SETTINGS,
    cache_salt,
    check_length,
    check_options,
    read_label,
    read_stamps,
    read_stop,
    sampling_fields,
    version_label,
)
from trace_async.errors import ConfigError, EngineError


def ask(*, length: int = 4, max_tokens: int = 8, seed: int = 0, greedy: bool = False) -> GenerateRequest:
    prefix = np.arange(length, dtype=np.int32)
    return GenerateRequest(request_id="r1", prefix_ids=prefix, max_tokens=max_tokens, seed=seed, greedy=greedy)


@given(version=st.integers(0, 10**9), epoch=st.integers(0, 10**6))
def test_a_label_says_which_version_of_which_epoch_it_is(version: int, epoch: int) -> None:
    assert read_label(version_label(version=version, epoch=epoch)) == (version, epoch)


@pytest.mark.parametrize("label", ["default", "", "v3", "e1v2x", "7", "e1v-2"])
def test_a_label_that_this_project_did_not_give_is_an_error(label: str) -> None:
    with pytest.raises(EngineError, match="no published version"):
        read_label(label)


def test_loading_a_version_again_changes_the_salt_of_the_prefix_cache() -> None:
    label = version_label(version=3, epoch=1)
    assert cache_salt(label, load=4) != cache_salt(label, load=5)


@given(seed=st.integers(-(2**80), 2**80), greedy=st.booleans(), temperature=st.floats(0.01, 100))
def test_sampling_fields_are_json_and_their_seed_is_one_that_torch_takes(
    seed: int, greedy: bool, temperature: float
) -> None:
    fields = sampling_fields(ask(seed=seed, greedy=greedy), temperature=temperature, stop_ids=(2, 5))
    assert json.loads(json.dumps(fields)) == fields
    assert 0 <= fields["seed"] < 2**63
    assert fields["stop_token_ids"] == [2, 5]


def test_nothing_of_a_model_folders_generation_config_can_change_what_is_sampled() -> None:
    fields = sampling_fields(ask(), temperature=0.7, stop_ids=[2])
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral |= {"repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": True, "n": 1, "temperature": 0.7}
    assert {name: fields[name] for name in neutral} == neutral


def test_a_greedy_request_tells_the_processor_the_temperature_of_its_log_probabilities() -> None:
    plain = sampling_fields(ask(greedy=True), temperature=1.0, stop_ids=[])
    other = sampling_fields(ask(greedy=True), temperature=0.7, stop_ids=[])
    assert plain["temperature"] == other["temperature"] == 0.0
    assert "extra_args" not in plain
    assert other["extra_args"] == {GREEDY_TEMPERATURE: 0.7}


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5), first=st.integers(0, 50))
def test_stamps_are_the_oldest_and_newest_version_that_sampled_a_token(lengths: list[int], first: int) -> None:
    ends = np.cumsum(lengths).tolist()
    labels = [version_label(version=first + i, epoch=1) for i in range(len(lengths))]
    spans = list(zip(labels, [0, *ends[:-1]], ends, strict=True))
    if ends[-1] == 0:
        with pytest.raises(EngineError, match="do not cover its 0 tokens"):
            read_stamps(spans, num_tokens=0, request_id="r1")
        return
    stamps = read_stamps(spans, num_tokens=ends[-1], request_id="r1")
    versions = [first + i for i, length in enumerate(lengths) if length]
    assert stamps == (min(versions), max(versions), min(versions))


@pytest.mark.parametrize(
    "spans",
    [[], [("e0v1", 0, 4)], [("e0v1", 1, 5)], [("e0v1", 0, 2), ("e0v2", 3, 5)], [("e0v1", 0, 3), ("e0v2", 2, 5)]],
)
def test_spans_that_do_not_cover_every_token_are_an_error(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(EngineError, match=r"r1: vLLM's version spans .* do not cover its 5 tokens"):
        read_stamps(spans, num_tokens=5, request_id="r1")


def test_an_answer_that_no_known_weights_sampled_is_an_error() -> None:
    with pytest.raises(EngineError, match="'default'"):
        read_stamps([("default", 0, 5)], num_tokens=5, request_id="r1")


def test_why_vllm_stopped_is_told_and_an_error_there_is_one_here() -> None:
    found = [read_stop(reason, request_id="r1") for reason in ("stop", "length", "abort")]
    assert found == [StopReason.STOP, StopReason.LENGTH, StopReason.ABORT]
    for reason in ("error", "repetition", None):
        with pytest.raises(EngineError, match="r1: vLLM ended the answer with"):
            read_stop(reason, request_id="r1")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *OWN_SETTINGS.items(),
        *(("model", "x"), ("dtype", "float16"), ("seed", 3), ("max_model_len", 10), ("quantization", "fp8")),
        *(("speculative_config", {}), ("spec_tokens", 2), ("logits_processors", []), ("enable_lora", True)),
        *(("override_generation_config", {"top_k": 5}), ("kv_transfer_config", {}), ("data_parallel_size", 2)),
    ],
)
def test_engine_arguments_that_would_make_records_untrue_are_refused_with_the_reason(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.options\.{key} .*remove it"):
        check_options({"gpu_memory_utilization": 0.5, key: value})


def test_other_engine_arguments_of_vllm_pass() -> None:
    check_options({"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2, "enforce_eager": False})


@pytest.mark.parametrize(("length", "max_tokens"), [(60, 5), (64, 1), (0, 4), (4, 0)])
def test_a_request_that_cannot_fit_is_refused_with_its_numbers(length: int, max_tokens: int) -> None:
    with pytest.raises(EngineError, match=rf"request r1: {length} prefix tokens.*{max_tokens}"):
        check_length(ask(length=length, max_tokens=max_tokens), max_model_tokens=64)


def test_a_request_that_just_fits_passes() -> None:
    check_length(ask(length=60, max_tokens=4), max_model_tokens=64)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_the_engine_kind_is_refused_with_the_cure_where_vllm_is_not_installed() -> None:
    with pytest.raises(ConfigError, match=r"vllm is not installed here; .* docs/vllm\.md|set engine\.kind"):
        check_parts(Config(engine=EngineConfig(kind="vllm")))


def test_refused_options_show_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"engine\.options\.speculative_config"):
        check_parts(Config(engine=EngineConfig(kind="vllm", options={"speculative_config": {}})))
