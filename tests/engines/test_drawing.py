"""Drawing from logits: the token that a plain cumulative sum finds, for every size of vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trace_async.engines.drawing import draw
from trace_async.engines.rows import uniform

ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@pytest.mark.parametrize("size", [2, 24, 512, 513, 1000, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_it_is_the_token_at_which_the_cumulative_distribution_passes_the_number(size: int, temperature: float) -> None:
    rng = np.random.default_rng(size)
    logits = torch.from_numpy(rng.normal(0, 3, (64, size)).astype(np.float32))
    numbers = [*rng.random(61).tolist(), 0.0, ALMOST_ONE, 0.5]
    found = draw(logits.clone(), temperature=temperature, numbers=numbers, greedy=[False] * 64)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    cumulative = exact.exp().cumsum(-1)
    for row, (token, logprob) in enumerate(found):
        below = float(cumulative[row, token - 1]) if token else 0.0
        assert below - 1e-6 <= numbers[row] <= float(cumulative[row, token]) + 1e-6
        assert abs(logprob - float(exact[row, token])) < 1e-5


@pytest.mark.parametrize("size", [24, 1000])
def test_a_greedy_row_takes_the_likeliest_token_beside_rows_that_are_drawn(size: int) -> None:
    logits = torch.randn(8, size, generator=torch.Generator().manual_seed(0))
    greedy = [row % 2 == 0 for row in range(8)]
    found = draw(logits.clone(), temperature=0.7, numbers=[ALMOST_ONE] * 8, greedy=greedy)
    exact = torch.log_softmax(logits / 0.7, -1)
    for row, (token, logprob) in enumerate(found):
        assert (token == int(logits[row].argmax())) == greedy[row]
        assert abs(logprob - float(exact[row, token])) < 1e-5


@pytest.mark.parametrize("size", [24, 1000])
@pytest.mark.parametrize("number", [0.0, 0.5, ALMOST_ONE])
def test_a_token_without_any_probability_is_never_drawn(size: int, number: float) -> None:
    for possible in (0, size // 2, size - 1):
        logits = torch.full((1, size), -float("inf"))
        logits[0, possible] = 1.0
        assert draw(logits, temperature=1.0, numbers=[number], greedy=[False]) == [(possible, 0.0)]


def test_a_requests_numbers_are_uniform_and_a_function_of_seed_and_index() -> None:
    numbers = np.array([uniform(seed, index) for seed in range(50) for index in range(100)])
    assert uniform(7, 3) == uniform(7 + (1 << 64), 3) != uniform(3, 7)
    assert 0 <= numbers.min() <= numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 250).max() < 6 * np.sqrt(250)
