"""The shape of the source, read from its syntax: who may import whom, what is banned where, and how long things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).parent.parent

LAYERS = {
    "types": ("core.types", "errors", ""),
    "support": (
        "environment",
        "config",
        "config_check",
        "config_load",
        "disk",
        "config_resume",
        "devices",
        "model_probe",
        "weights",
        "canary",
    ),
    "core": ("core.*", "core"),
    "methods": ("methods.*", "methods"),
    "adapters": (
        *("transport", "transport.*", "ledger", "learning.checkpoint", "run_folder", "metrics"),
        *("engines", "engines.*", "scoring", "prompts", "rendering"),
        *("trainer", "trainer_files", "trainer_lora", "trainer_scoring", "trainer_update"),
        *("trainer_attention", "trainer_head", "trainer_layers", "trainer_lifeline", "trainer_ranks"),
        *("trainer_remote", "trainer_schedule", "trainer_wire"),
        *("publication", "publication.*"),
        *("predictors", "predictors.*", "prefixes"),
        *("app.processes", "app.stopping"),
    ),
    "growth": ("acting.turns", "acting.expansion", "acting.story", "acting.versions"),
    "roles": (
        *("acting", "acting.*", "coordination", "coordination.*"),
        *("learning", "learning.*", "policies", "policies.*"),
    ),
    "top": ("app", "app.*", "cli", "__main__"),
}
"""From the bottom up; `x.*` stands for modules of a folder that no lower layer names. Imports go down or sideways."""

ADAPTER_FRIENDS = {
    ("transport", "transport"),
    ("engines", "engines"),
    ("ledger", "transport"),
    ("trainer", "trainer_files"),
    ("trainer", "trainer_lora"),
    ("trainer", "trainer_scoring"),
    ("trainer", "trainer_update"),
    ("trainer", "trainer_layers"),
    ("trainer", "trainer_ranks"),
    ("trainer", "trainer_schedule"),
    ("trainer_update", "trainer_scoring"),
    ("trainer_update", "trainer_ranks"),
    *(("trainer_remote", name) for name in ("trainer", "trainer_lifeline", "trainer_ranks", "trainer_wire")),
    ("trainer_scoring", "trainer_attention"),
    ("trainer_scoring", "trainer_head"),
    ("predictors", "predictors"),
    ("publication", "publication"),
}
"""Adapters do not know each other, except these pairs of rooms (who imports, what)."""

NEEDS_TORCH = {
    *("methods.objectives.measures", "methods.objectives.ratios", "methods.objectives.registry"),
    *(
        "methods.objectives.tree_tis",
        "methods.objectives.turns",
        "methods.objectives.anchor",
        "methods.objectives.m2po",
    ),
    *("methods.objectives.masks", "methods.objectives.ppo", "methods.objectives.reinforce"),
    *("methods.objectives.gspo", "methods.objectives.lpo", "methods.objectives.simplex", "methods.objectives.topr"),
    *("methods.objectives.trees", "methods.objectives.vtrace", "methods.objectives.m2_brake"),
    *("trainer", "trainer_files", "trainer_lora", "trainer_scoring", "trainer_update"),
    *("trainer_attention", "trainer_head", "trainer_layers", "trainer_ranks", "trainer_remote", "trainer_wire"),
    "weights",
    "engines.arenas",
    "engines.batched_model",
    "engines.drawing",
    "engines.llama_decoder",
    "engines.llama_pass",
    "engines.llama_weights",
    "engines.prefill",
    "engines.rows",
    "engines.transformers_decoder",
    "engines.local",
    "engines.prefix_cache",
    "engines.sampler",
    "engines.vllm_processor",
    "policies.gguf_llama",
    "policies.tiny",
    "policies.warm_start",
    "app.get_policy",
    "app.make_policy",
    "app.make_policy_frozenlake",
    "app.make_policy_multihop",
}
"""Modules that import torch or transformers when they are imported; everybody else does it inside a function."""

IMPURE = {
    *("asyncio", "torch", "transformers", "zmq", "uvloop", "time", "datetime", "random", "secrets", "os", "logging"),
    *("socket", "subprocess", "threading", "multiprocessing", "concurrent", "signal", "tempfile", "pathlib", "io"),
}
"""What pure code does not import: anything that waits, looks at a clock, draws by itself or touches the machine."""

UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
LONG_FILES: dict[str, int] = {
    "trace_async/core/types.py": 325,  # every shared record and the glossary in one place, on purpose
    "trace_async/coordination/coordinator.py": 310,  # one state machine with all its doors
}
LONG_FUNCTIONS: dict[str, int] = {}


class Import(NamedTuple):
    """One imported module name, absolute."""

    name: str
    line: int
    at_import_time: bool


def source_files(*roots: str) -> list[Path]:
    return sorted(path for root in roots for path in (REPO / root).rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name inside trace_async; "" for the package itself."""
    parts = path.relative_to(REPO / "trace_async").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[Import]:
    """Every import but those for the type checker only."""
    todo: list[tuple[ast.AST, bool]] = [(parse(path), True)]
    while todo:
        node, at_import_time = todo.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_import_time) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:  # `from package import module` names the module, not only the package
                inner = REPO.joinpath(*base.split("."), f"{alias.name}.py")
                yield Import(f"{base}.{alias.name}" if inner.exists() else base, node.lineno, at_import_time)
        inside = at_import_time and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        children: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            children = list(node.orelse)
        todo.extend((child, inside) for child in children)


def inner_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Imports of trace_async, named inside it."""
    for found in imports(path):
        if found.name == "trace_async" or found.name.startswith("trace_async."):
            yield found.name.removeprefix("trace_async").lstrip("."), found.line


def layer_of(module: str) -> int:
    for rank, names in enumerate(LAYERS.values()):
        if module in names:
            return rank
    for rank, names in enumerate(LAYERS.values()):
        if f"{module.partition('.')[0]}.*" in names:
            return rank
    raise AssertionError(f"trace_async/{module.replace('.', '/')}.py: name its layer in LAYERS of this file")


def room(module: str) -> str:
    """The folder or the single file that a module belongs to."""
    return module.partition(".")[0]


PACKAGE = source_files("trace_async")
PURE = source_files("trace_async/core", "trace_async/methods")
ids = {"ids": lambda path: str(path.relative_to(REPO))}


@pytest.mark.parametrize("path", PACKAGE, **ids)  # type: ignore[arg-type]
def test_imports_inside_the_package_go_downwards(path: Path) -> None:
    module = module_name(path)
    upward = [
        f"{path.name}:{line} imports {name}" for name, line in inner_imports(path) if layer_of(name) > layer_of(module)
    ]
    assert not upward


def test_no_two_modules_import_each_other_however_long_the_way() -> None:
    below = {module_name(path): sorted({name for name, _ in inner_imports(path)}) for path in PACKAGE}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"import circle: {' -> '.join([*way[way.index(module) :], module])}"
        if module not in done:
            for name in below[module]:
                visit(name, (*way, module))
            done.add(module)

    for module in below:
        visit(module, ())


def test_adapters_do_not_know_each_other() -> None:
    adapters = list(LAYERS).index("adapters")
    pairs = {
        (room(module_name(path)), room(name))
        for path in PACKAGE
        for name, _ in inner_imports(path)
        if layer_of(module_name(path)) == adapters == layer_of(name)
    }
    assert pairs <= ADAPTER_FRIENDS


@pytest.mark.parametrize("path", PURE, **ids)  # type: ignore[arg-type]
def test_pure_code_does_not_wait_look_at_clocks_or_touch_the_machine(path: Path) -> None:
    impure = IMPURE - {"torch"} if path.parent.name == "objectives" else IMPURE  # functions of tensors
    banned = [f"line {found.line}: {found.name}" for found in imports(path) if found.name.split(".")[0] in impure]
    assert not banned


@pytest.mark.parametrize("path", PURE, **ids)  # type: ignore[arg-type]
def test_pure_code_draws_only_from_a_generator_that_it_was_given(path: Path) -> None:
    uses = [
        f"line {node.lineno}: np.random.{node.attr}"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "random"
        and node.attr != "Generator"
    ]
    assert not uses


@pytest.mark.parametrize("path", [path for path in PACKAGE if module_name(path) not in NEEDS_TORCH], **ids)  # type: ignore[arg-type]
def test_torch_is_imported_only_where_it_is_needed(path: Path) -> None:
    heavy = [
        f"line {found.line}: {found.name}"
        for found in imports(path)
        if found.at_import_time and found.name.split(".")[0] in {"torch", "transformers"}
    ]
    assert not heavy


@pytest.mark.parametrize("path", source_files("envs"), **ids)  # type: ignore[arg-type]
def test_an_environment_knows_the_records_and_its_protocol_only(path: Path) -> None:
    assert {name for name, _ in inner_imports(path)} <= {"core.types", "environment", "errors"}


def test_nothing_unpickles() -> None:
    found = [
        f"{path.relative_to(REPO)}:{one.line}: {one.name}"
        for path in source_files("trace_async", "envs", "tools", "benchmarks")
        for one in imports(path)
        if one.name.split(".")[0] in UNSAFE
    ]
    assert not found


def test_every_task_has_a_task_group_for_a_parent() -> None:
    orphans = [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for path in source_files("trace_async", "envs")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"create_task", "ensure_future"}
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in {"asyncio", "loop"}
    ]
    assert not orphans


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(REPO)): len(path.read_text(encoding="utf-8").splitlines())
        for path in source_files("trace_async", "envs", "tools")
    }
    assert not {name: length for name, length in lengths.items() if length > LONG_FILES.get(name, MAX_FILE_LINES)}
    assert set(LONG_FILES) <= set(lengths), "LONG_FILES names a file that is gone"


def test_functions_fit_a_screen() -> None:
    long = {}
    for path in source_files("trace_async", "envs", "tools"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(REPO)}:{node.name}"
                length = body_lines(node)
                if length > LONG_FUNCTIONS.get(name, MAX_FUNCTION_LINES):
                    long[name] = length
    assert not long


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement behind the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize(
    "module", ["trace_async.acting.actor", "trace_async.config_load", "trace_async.app.supervise", "trace_async.cli"]
)
def test_it_imports_on_a_machine_without_torch(module: str) -> None:
    block = "import sys; sys.modules.update(torch=None, transformers=None, matplotlib=None)"
    code = f"{block}; import {module}"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
