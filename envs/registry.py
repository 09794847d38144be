"""From the name of an environment in the configuration to its kit; the one place that knows the shipped ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from envs.frozenlake import make_frozenlake
from trace_async.environment import EnvironmentKit
from trace_async.errors import ConfigError

KitMaker: TypeAlias = Callable[[Mapping[str, Any]], EnvironmentKit]


def _make_multihop_qa(options: Mapping[str, Any]) -> EnvironmentKit:
    from envs.multihop_qa.kit import make_multihop_qa  # its retrieval packages take a while to import

    return make_multihop_qa(options)


ENVIRONMENTS: Mapping[str, KitMaker] = {"frozenlake": make_frozenlake, "multihop_qa": _make_multihop_qa}


def load_environment(name: str, options: Mapping[str, Any]) -> EnvironmentKit:
    """The kit called `name`: a shipped environment, or `package.module:function` of the user's own.

    Such a function takes the options table and returns an EnvironmentKit. Raises ConfigError when there is no such
    environment or the options are refused; an ImportError inside the user's module is passed on as its cause.
    """
    maker = _own(name) if ":" in name else ENVIRONMENTS.get(name)
    if maker is None:
        raise ConfigError(
            f"environment.name: no environment {name!r}; known: {', '.join(sorted(ENVIRONMENTS))}, "
            'or your own as "package.module:function"'
        )
    kit = maker(options)
    if not isinstance(kit, EnvironmentKit):
        raise ConfigError(f"environment.name: {name!r} must return an EnvironmentKit, got {type(kit).__name__}")
    return kit


def _own(name: str) -> KitMaker:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: an empty module name
        raise ConfigError(
            f"environment.name: cannot import module {module_name!r} of {name!r}: {error}; is its folder on PYTHONPATH?"
        ) from error
    maker = getattr(module, function_name, None)
    if not callable(maker):
        raise ConfigError(f"environment.name: module {module_name!r} has no function {function_name!r}")
    return maker  # type: ignore[no-any-return]
