"""Device names from the configuration."""

from __future__ import annotations

import pytest
import torch

from trace_async.devices import pick_device
from trace_async.errors import ConfigError


def test_auto_takes_cuda_where_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto", key="engine.device").type == expected
    assert pick_device("cpu", key="engine.device").type == "cpu"


@pytest.mark.parametrize("name", ["cuda:99", "warp"])
def test_a_device_that_is_not_there_is_refused_with_the_key_and_the_cure(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner\.device = '{name}'.*use auto or cpu"):
        pick_device(name, key="learner.device")
