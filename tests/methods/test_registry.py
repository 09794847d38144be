"""Strict names and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from trace_async.errors import ConfigError
from trace_async.methods.registry import pick, read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    share: float = 0.5
    count: int = 3
    eager: bool = False
    form: Literal["beta", "point"] = "beta"
    folder: str = ""


def test_a_known_name_is_picked_and_an_unknown_one_is_refused_with_the_nearest() -> None:
    assert pick({"trace": 1, "random": 2}, "trace", where="tree.allocator") == 1
    with pytest.raises(ConfigError, match=r"tree.allocator = 'trce' is not known; did you mean 'trace'\?"):
        pick({"trace": 1, "random": 2}, "trce", where="tree.allocator")
    with pytest.raises(ConfigError, match="known: random, trace"):
        pick({"trace": 1, "random": 2}, "xyz", where="tree.allocator")


def test_options_become_their_record_and_a_whole_number_is_a_number() -> None:
    assert read_options(Options, {"share": 1}, where="x") == Options(share=1, count=3)


def test_switches_choices_and_texts_are_read_as_such() -> None:
    read = read_options(Options, {"eager": True, "form": "point", "folder": "models/small"}, where="x")

    assert read == Options(eager=True, form="point", folder="models/small")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"shares": 0.1}, r"x.shares is no option here; did you mean 'share'\?"),
        ({"zzz": 0.1}, "known: count, eager, folder, form, share"),
        ({"share": "much"}, "x.share must be a number, got 'much'"),
        ({"share": True}, "must be a number"),
        ({"share": float("nan")}, "must be a number"),
        ({"count": 1.5}, "x.count must be a whole number, got 1.5"),
        ({"eager": 1}, "x.eager must be true or false, got 1"),
        ({"eager": "true"}, "x.eager must be true or false, got 'true'"),
        ({"folder": 1}, "x.folder must be a text in quotes, got 1"),
        ({"form": "pint"}, "x.form must be one of 'beta', 'point', got 'pint'"),
        ({"form": 1}, "x.form must be one of 'beta', 'point', got 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_options(Options, options, where="x")
