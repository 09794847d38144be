"""A generated world: entities, pages and multi-hop questions that nobody can know by heart."""

from envs.multihop_qa.world.build import World, make_world
from envs.multihop_qa.world.files import read_world
from envs.multihop_qa.world.names import SYLLABLES
from envs.multihop_qa.world.options import WorldOptions, new_world_options
from envs.multihop_qa.world.wording import PUNCTUATION, UNKNOWN, vocabulary
from envs.multihop_qa.world.writing import write_world

__all__ = [
    "PUNCTUATION",
    "SYLLABLES",
    "UNKNOWN",
    "World",
    "WorldOptions",
    "make_world",
    "new_world_options",
    "read_world",
    "vocabulary",
    "write_world",
]
