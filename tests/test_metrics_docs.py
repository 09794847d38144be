"""docs/metrics.md lists every key that a row can have, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parent.parent
SOURCES = (
    *("learning/measures.py", "learning/costs.py", "learning/honesty.py", "learning/train_loop.py"),
    "learning/spread.py",
    *("trainer.py", "metrics.py", "methods/objectives/measures.py"),
)
STAGES = (
    *("training", "timing_s", "rollout", "critic", "predictor", "allocation", "engine", "wire", "groups", "permits"),
    *("shelf", "staleness", "actor", "objective", "cost", "publication"),
)
KEY = re.compile(rf"(?:{'|'.join(STAGES)}|<x>)/[\w<>/]+")


def keys_in_source() -> Iterator[str]:
    """String literals that look like keys; what an f-string fills in reads `<x>`."""
    for name in SOURCES:
        tree = ast.parse((REPO / "trace_async" / name).read_text(encoding="utf-8"))
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "<x>" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            else:
                continue
            if KEY.fullmatch(text) and text != "<x>/<x>":
                yield text


def keys_in_docs() -> list[str]:
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    return [re.sub(r"<\w+>", "<x>", key) for key in re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)]


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    assert sorted(set(keys_in_source())) == sorted(keys_in_docs())
