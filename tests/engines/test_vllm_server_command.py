"""The command line that `trace-async vllm-server` makes, and which configurations may name a server."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trace_async.app.serve import server_command
from trace_async.config_load import load_config
from trace_async.engines.vllm_common import GREEDY_PROCESSOR, OWN_SETTINGS, WORKER_EXTENSION
from trace_async.errors import ConfigError, UserError

SERVER = '[engine]\nkind = "vllm_server"\nserver_url = "http://127.0.0.1:8123"\ndevice = "cpu"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def flags_of(argv: tuple[str, ...]) -> dict[str, list[str]]:
    """Each flag and what follows it."""
    found: dict[str, list[str]] = {}
    for word in argv[3:]:
        if word.startswith("--"):
            found[word] = last = []
        else:
            last.append(word)
    return found


def test_the_server_is_started_with_what_the_engine_demands(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, SERVER), ["engine.max_batch=16", "tree.max_context_tokens=200"])
    command = server_command(config, host=None, port=None)
    flags = flags_of(command.argv)
    assert command.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert flags["--host"] == ["127.0.0.1"]
    assert flags["--port"] == ["8123"]
    assert flags["--logprobs-mode"] == [OWN_SETTINGS["logprobs_mode"]]
    assert flags["--worker-extension-cls"] == [WORKER_EXTENSION]
    assert flags["--dtype"] == ["float32"]
    assert flags["--enable-scale-out"] == flags["--enable-prefix-caching"] == []
    assert int(flags["--max-model-len"][0]) >= 200
    assert int(flags["--max-num-seqs"][0]) > 16, "a place for the canary"
    assert "--skip-tokenizer-init" not in flags, "the server checks token ids against its vocabulary"
    assert "--logits-processors" not in flags
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert Path(command.environment["PYTHONPATH"].split(":")[0], "trace_async", "engines").is_dir()


def test_engine_options_become_flags_as_vllm_spells_them(tmp_path: Path) -> None:
    options = "[engine.options]\nenforce_eager = false\ntensor_parallel_size = 2\ncompilation_config = {level = 1}\n"
    config = load_config(written(tmp_path, SERVER + "temperature = 0.7\n" + options))
    flags = flags_of(server_command(config, host="0.0.0.0", port=9).argv)
    assert flags["--no-enforce-eager"] == []
    assert flags["--tensor-parallel-size"] == ["2"]
    assert flags["--compilation-config"] == ['{"level": 1}']
    assert flags["--logits-processors"] == [GREEDY_PROCESSOR]
    assert (flags["--host"], flags["--port"]) == (["0.0.0.0"], ["9"])


def test_a_device_of_another_machine_may_be_named(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, SERVER), ["engine.device=cuda:1"])
    flags = flags_of(server_command(config, host=None, port=None).argv)
    assert flags["--device-ids"] == ["1"]
    assert "--enforce-eager" not in flags


def test_the_command_can_be_printed_where_vllm_is_not_installed(tmp_path: Path) -> None:
    path = written(tmp_path, SERVER)
    line = ["vllm-server", str(path), "--print"]
    code = f"import sys; sys.modules['vllm'] = None; from trace_async.cli import main; sys.exit(main({line!r}))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    words = shlex.split(printed)
    assert words[0] == "env"
    assert words[words.index("-m") + 1] == "vllm.entrypoints.openai.api_server"


def test_another_engine_has_no_server_to_start(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, ""))
    with pytest.raises(UserError, match=r"engine.kind is 'local'"):
        server_command(config, host=None, port=None)


def test_options_that_would_change_what_is_sampled_are_refused(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, SERVER + "[engine.options]\nlogprobs_mode = 'raw_logprobs'\n"))
    with pytest.raises(ConfigError, match=r"engine.options.logprobs_mode must stay 'processed_logprobs'"):
        server_command(config, host=None, port=None)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "http://127.0.0.1",
        "http://:8000",
        "http://h:99999",
        "ftp://h:1",
        "http://u:p@h:1",
        "http://h:1/v1",
    ],
)
def test_a_server_needs_an_address_with_a_port_and_nothing_else(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.server_url: is .*: give http://HOST:PORT"):
        load_config(written(tmp_path, f'[engine]\nkind = "vllm_server"\nserver_url = "{url}"\n'))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://node-7.cluster:8443/", "http://[::1]:80"])
def test_any_host_and_port_may_be_named(tmp_path: Path, url: str) -> None:
    load_config(written(tmp_path, f'[engine]\nkind = "vllm_server"\nserver_url = "{url}"\n'))


def test_an_address_that_nobody_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.kind = 'local' uses no server; remove it"):
        load_config(written(tmp_path, '[engine]\nserver_url = "http://127.0.0.1:8000"\n'))


def test_one_server_is_for_one_actor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor.count: is 2, .*trace-async actor RUN --server URL"):
        load_config(written(tmp_path, SERVER), ["actor.count=2"])
