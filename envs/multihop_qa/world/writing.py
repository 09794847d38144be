"""A world as a folder, written at once.

    corpus.jsonl               one page a line, as FlashRAG has it: id, contents with the title in quotes as first line
    train.jsonl heldout.jsonl  one question a line: everything of a `Question` but paragraphs, its split, the digest
    world.json                 format, options, digest, numbers
    new_world_corpus.jsonl     the same of a second world, where there is one; the questions of both its splits are
    new_world.jsonl            in one file

Invariant: a folder of that name is there with all its files, or not at all. Equal worlds are equal bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from envs.multihop_qa.world.build import World, question_data
from envs.multihop_qa.world.graph import SPLITS
from trace_async.errors import ConfigError

FORMAT = 1
"""Number of this layout, in world.json."""

CORPUS = {"world": "corpus.jsonl", "new_world": "new_world_corpus.jsonl"}
QUESTIONS = {"world": tuple(f"{split}.jsonl" for split in SPLITS), "new_world": ("new_world.jsonl",)}
ABOUT = "world.json"


def write_world(world: World, folder: Path, *, new_world: World | None) -> None:
    """Make `folder`. Raises ConfigError when it exists and is not an empty folder; OSError as the disk does."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; give the name of a new one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        made = Path(aside) / "world"
        made.mkdir()
        for name, lines in _files(world, new_world):
            _write(made / name, lines)
        _sync(made)
        made.rename(folder)  # onto an empty folder it may go, onto another it fails
    _sync(folder.parent)


def _files(world: World, new_world: World | None) -> Iterator[tuple[str, Iterable[object]]]:
    """Names of files and what their lines hold."""
    worlds = {"world": world} | ({"new_world": new_world} if new_world is not None else {})
    for part, one in worlds.items():
        yield CORPUS[part], ({"id": page.doc_id, "contents": f'"{page.title}"\n{page.text}'} for page in one.pages)
    for split, name in zip(SPLITS, QUESTIONS["world"], strict=True):
        yield name, _question_lines(world, split)
    if new_world is not None:
        yield QUESTIONS["new_world"][0], (line for split in SPLITS for line in _question_lines(new_world, split))
    yield ABOUT, [{"format": FORMAT, **{part: _about(one) for part, one in worlds.items()}}]


def _question_lines(world: World, split: str) -> Iterator[dict[str, object]]:
    for question in world.questions[split]:
        yield {**question_data(question, split), "world": world.digest}


def _about(world: World) -> dict[str, object]:
    counts = {
        split: {
            "questions": len(questions),
            "kinds": dict(sorted(Counter(question.kind for question in questions).items())),
            "hops": {str(hops): number for hops, number in sorted(Counter(one.hops for one in questions).items())},
        }
        for split, questions in world.questions.items()
    }
    return {"options": asdict(world.options), "digest": world.digest, "pages": len(world.pages), "splits": counts}


def _write(path: Path, lines: Iterable[object]) -> None:
    with path.open("w", encoding="ascii", newline="\n") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    _sync(path)


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
