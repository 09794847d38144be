"""`trace-async make-world`: a generated world, and a new one without a name in common, as a folder.

Options come as `KEY=VALUE` texts whose values are TOML, or bare texts for options that are texts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from envs.multihop_qa.world import World, WorldOptions, make_world, new_world_options, write_world
from envs.options import read_options
from trace_async.errors import ConfigError


def make_world_folder(out: Path, settings: Sequence[str], *, with_new_world: bool, say: Callable[[str], None]) -> World:
    """Make `out`, a new folder, with a world of these settings; returns the world. `say` hears each stage.

    Raises ConfigError for a setting that is refused, a world that does not yield its questions, or a folder in use.
    """
    options = world_options(settings)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give the name of a new one")
    say("making the world")
    world = make_world(options)
    new_world = None
    if with_new_world:
        say("making the new world")
        new_world = make_world(new_world_options(options))
    say(f"writing {out}")
    write_world(world, out, new_world=new_world)
    return world


def world_options(settings: Sequence[str]) -> WorldOptions:
    """Options from `KEY=VALUE` texts, later ones winning. ConfigError for what is not one."""
    table: dict[str, object] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {setting}: expected key=value, for example pages=600")
        table[name.strip()] = _value(text.strip())
    return read_options(WorldOptions, table, owner="a world", where="world")


def describe(world: World) -> Mapping[str, str]:
    """What to tell of a world, by what it is."""
    told = {"digest": world.digest, "pages": str(len(world.pages))}
    for split, questions in world.questions.items():
        told[f"{split} questions"] = str(len(questions))
    return told


def _value(text: str) -> object:
    """The value as TOML, else as a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
