"""Loading, refusing, overriding and saving the configuration."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.config_docs import render
from trace_async.config import Config, EnvironmentConfig, TreeConfig
from trace_async.config_check import CHOICES, RANGES, Range, find_problems, leaf_values
from trace_async.config_load import from_json, known_keys, load_config, load_saved_config, save_config, to_json
from trace_async.errors import ConfigError


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Config()


def test_a_file_changes_only_what_it_names(tmp_path: Path) -> None:
    config = load(tmp_path, "[tree]\nroots_per_step = 32\n[environment.options]\nsizes = [4, 5]\n")
    assert config.tree == dataclasses.replace(TreeConfig(), roots_per_step=32)
    assert config.environment.options == {"sizes": [4, 5]}
    assert config.learner == Config().learner


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("[tree]\nroot_per_step = 3", "tree.root_per_step: unknown key; did you mean tree.roots_per_step?"),
        ("[tree]\nlearning_rate = 1.0", "tree.learning_rate: unknown key; did you mean learner.learning_rate?"),
        ("[lerner]\nmax_steps = 3", "lerner: unknown key; did you mean [learner]?"),
        ("max_steps = 3", "max_steps: unknown key; did you mean learner.max_steps?"),
        ("[run]\nzzz = 3", "run.zzz: unknown key; known here: name, dir, seed"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path, text: str, suggestion: str) -> None:
    assert refusal(tmp_path, text) == f"{tmp_path / 'run.toml'}: {suggestion}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[learner]\nmax_steps = "60"', "learner.max_steps: expected an integer, got string '60'"),
        ("[learner]\nmax_steps = 60.0", "learner.max_steps: expected an integer, got number 60.0"),
        ("[learner]\nmax_steps = true", "learner.max_steps: expected an integer, got boolean true"),
        ("[learner]\nlearning_rate = nan", "learner.learning_rate: expected a finite number, got number nan"),
        ("[learner]\nlearning_rate = true", "learner.learning_rate: expected a finite number, got boolean true"),
        ("[run]\nname = 3", "run.name: expected a string, got integer 3"),
        ("[evaluation]\ngreedy = 1", "evaluation.greedy: expected true or false, got integer 1"),
        ("[tree]\noptions = [1]", "tree.options: expected a table, got list [1]"),
        ("tree = 4", "tree: is a section, got integer 4; set one of its keys: allocator, options,"),
        (
            "[tree.options]\nwhen = 2026-01-01",
            "tree.options.when: expected a string, number, boolean, list or table, got date",
        ),
    ],
)
def test_a_wrong_type_is_refused_with_the_expected_one(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in refusal(tmp_path, text)


def test_an_integer_is_taken_for_a_number_and_becomes_one(tmp_path: Path) -> None:
    temperature = load(tmp_path, "[engine]\ntemperature = 1").engine.temperature
    assert (temperature, type(temperature)) == (1.0, float)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, "[tree]\nx = 1\nmax_turns = 0.5\n[run]\nseed = '1'").splitlines()) == 3


def test_a_file_that_is_missing_or_no_toml_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml")
    assert "not valid TOML" in refusal(tmp_path, "[tree")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("learner.max_steps=7", "learner.max_steps", 7),
        ("learner.learning_rate = 3e-4", "learner.learning_rate", 3e-4),
        ("evaluation.greedy=false", "evaluation.greedy", False),
        ("run.name=seed three", "run.name", "seed three"),
        ("run.name='quoted'", "run.name", "quoted"),
        ("run.name=2026", "run.name", "2026"),
        ("run.name=a=b", "run.name", "a=b"),
        ("tree.options={c = 1}", "tree.options", {"c": 1}),
        ("tree.options.deep.c=[1, 2]", "tree.options", {"deep": {"c": [1, 2]}}),
    ],
)
def test_an_override_takes_toml_values_and_bare_words(tmp_path: Path, override: str, key: str, value: object) -> None:
    assert dict(leaf_values(load(tmp_path, "", override)))[key] == value


def test_a_later_override_wins_over_an_earlier_one_and_over_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, "[learner]\nmax_steps = 1", "learner.max_steps=2", "learner.max_steps=3")
    assert config.learner.max_steps == 3


def test_an_override_is_named_in_the_error_it_causes(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "tree.max_turn=3").startswith("--set tree.max_turn=3: tree.max_turn: unknown key")
    assert refusal(tmp_path, "", "learner.max_steps=abc").endswith("expected an integer, got string 'abc'")
    assert "expected section.key=value" in refusal(tmp_path, "", "learner.max_steps")
    assert "not a table" in refusal(tmp_path, "", "learner.max_steps=3", "learner.max_steps.x=3")


def test_an_override_cannot_smuggle_in_a_second_key(tmp_path: Path) -> None:
    assert "expected an integer" in refusal(tmp_path, "", "learner.max_steps=1\nother = 2")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[coordinator]\nsoft_age_steps = 5",
            "soft_age_steps: is 5, more than coordinator.max_age_steps = 4; lower it",
        ),
        ("[tree]\nallocator = 'uniform'", "uniform allocator grows chains only; set it to 0"),
        ("[actor]\nmax_live_roots = 7", "would never be leased; raise it"),
        ("[prompts]\ncandidates_per_round = 7", "tree.roots_per_step: is 64, more than"),
        ("[prompts]\nnum_train = 100", "candidates_per_round: is 128, more than prompts.num_train = 100"),
        ("[evaluation]\nnum_prompts = 513", "more than prompts.num_heldout = 512; lower it"),
        ("[coordinator]\ndead_after_s = 1.5", "less than two heartbeats of 1 s"),
        ("[coordinator]\nlease_deadline_s = 60", "one slow turn would cost the whole tree"),
        ("[coordinator]\naddress = 'tcp://0.0.0.0:5555'", "set coordinator.trust_network = true"),
        ("[publication]\naddress = 'tcp://10.0.0.7:0'", "address: is 'tcp://10.0.0.7:0', which other machines reach"),
        (
            "[publication]\naddress = 'ipc:///tmp/weights'",
            "publication.address: is 'ipc:///tmp/weights': give tcp://HOST:PORT",
        ),
        ("[engine]\nmax_turn_tokens = 256", "no turn would fit beside the prompt"),
        ("[learner]\nmicro_batch_tokens = 255", "a full path would not fit into one forward pass"),
        ("[evaluation]\ngreedy = false\nsampled = false", "nothing would be measured"),
        ("[objective]\ncap_positive = 0.9", "objective.cap_positive: must be >= 1, got 0.9"),
        ("[objective]\nveto_low = 1.0", "objective.veto_low: must be >= 0 and < 1, got 1.0"),
        ("[engine]\non_update = 'pause'", "engine.on_update: must be one of drain, continue, got 'pause'"),
        ("[run]\nname = ''", "run.name: must not be empty"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_the_cure(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in refusal(tmp_path, text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_threshold_of_success_is_a_finite_number(tmp_path: Path, value: float) -> None:
    assert "environment.success_above: " in refusal(tmp_path, "", f"environment.success_above={value}")
    config = Config(environment=EnvironmentConfig(success_above=value))
    assert [key for key, _ in find_problems(config)] == ["environment.success_above"]


def test_any_reward_range_can_have_its_threshold(tmp_path: Path) -> None:
    for text, value in (("-1.5", -1.5), ("0", 0.0), ("0.8", 0.8)):
        assert load(tmp_path, "", f"environment.success_above={text}").environment.success_above == value
    assert Config().environment.success_above == 0.5


def test_every_number_has_a_range_and_every_rule_a_key() -> None:
    numbers = {key for key, value in leaf_values(Config()) if type(value) in (int, float)}
    assert set(RANGES) == numbers
    assert set(CHOICES) <= set(known_keys())


@pytest.mark.parametrize(
    ("limits", "value", "inside"),
    [
        (Range(0, above=True), 0, False),
        (Range(0), 0, True),
        (Range(0, 1), 1, True),
        (Range(0, 1, below=True), 1, False),
    ],
)
def test_a_range_includes_its_ends_unless_it_says_so(limits: Range, value: float, inside: bool) -> None:
    assert (value in limits) is inside


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(options=st.dictionaries(st.text(), JSON, max_size=3), seed=st.integers(0, 2**32 - 1), name=st.text(min_size=1))
def test_json_brings_every_value_back_none_included(options: dict[str, object], seed: int, name: str) -> None:
    default = Config()
    config = dataclasses.replace(
        default,
        run=dataclasses.replace(default.run, seed=seed, name=name),
        tree=dataclasses.replace(default.tree, options=options),
    )
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_a_saved_configuration_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    config = load(tmp_path, "[learner]\nmax_steps = 5")
    save_config(config, tmp_path / "config.json")
    assert load_saved_config(tmp_path / "config.json") == config


@pytest.mark.parametrize("content", ["{", "[]", '{"tree": {"x": 1}}'])
def test_a_damaged_saved_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_saved_config(tmp_path / "config.json")


def test_permits_are_one_round_more_than_the_age_bound(tmp_path: Path) -> None:
    config = load(tmp_path, "[coordinator]\nmax_age_steps = 2\nsoft_age_steps = 1\n[tree]\nroots_per_step = 10")
    assert config.max_permits == 30


def test_the_documentation_of_the_keys_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_key_has_a_meaning() -> None:
    assert not [line for line in render().splitlines() if line.endswith("|  |")]


def test_every_key_is_read_by_some_component() -> None:
    package = Path(__file__).parent.parent / "trace_async"
    sources = [path for path in package.rglob("*.py") if not path.name.startswith("config")]
    read = {
        node.attr
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    consents = {"coordinator.trust_network"}  # only unlock what the check refuses
    assert {key for key in known_keys() if key.rpartition(".")[2] not in read} == consents
