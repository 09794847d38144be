"""Where a budget of rollouts is worth most: over prompts (roots) and over the prefixes of one prompt (continuations).

Pure numbers in, counts out. Sources: TRACE, "Tree Rollout Allocation for Contrastive Exploration" (arXiv 2606.11119),
for the two values; the marginals, the Beta forms and the solvers are derived here.

    V_root(m) = 1 - v^m - (1-v)^m    chance that m rollouts from a prompt, each a success with probability v, are mixed
    V_pref(k) = 1 - q^k              chance that one of k continuations does not repeat the outcome already seen

Invariants: counts sum to the budget exactly or the call raises; equal choices are decided by the generator handed in,
so an untrained predictor does not always pick the same prompts; a value is an expectation under the belief, and the
Beta forms integrate the belief exactly instead of plugging in its mean (V_root is concave in v, so a plug-in overrates
what is uncertain). Knows no allocator: who asks, and for what, is in `root_allocators` and `allocators`.
Legend: C candidate prompts, n anchors.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trace_async.errors import ConfigError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

EXACT_CELLS = 20_000_000
"""Largest C x (budget + 1) x (max_roots + 1) that is solved exactly, 30 to 45 ms of one core; above, the heap."""


# ---- values of roots ---------------------------------------------------------------------------------------------


def root_value(v: ArrayLike, m: ArrayLike) -> Floats:
    """V_root, broadcast over v (probability in [0, 1]) and m (rollouts, >= 0); 0 for m of 0 and 1."""
    v, m = np.asarray(v, np.float64), np.asarray(m, np.float64)
    return np.where(m < 2, 0.0, 1.0 - v**m - (1.0 - v) ** m)


def root_values(v: ArrayLike, max_roots: int) -> Floats:
    """V_root [C, max_roots + 1] of 0 .. max_roots rollouts for each v [C]. Raises ValueError outside [0, 1]."""
    v = np.asarray(v, np.float64)
    if v.ndim != 1 or not ((v >= 0.0) & (v <= 1.0)).all():
        raise ValueError(f"success probabilities must be one row of numbers in [0, 1], got shape {v.shape}: {v}")
    return root_value(v[:, None], np.arange(max_roots + 1))


def root_value_beta(alpha: ArrayLike, beta: ArrayLike, m: int) -> Floats:
    """E V_root(m) for v ~ Beta(alpha, beta), broadcast: 1 - (alpha)_m/(alpha+beta)_m - (beta)_m/(alpha+beta)_m.

    (x)_m = x (x+1) ... (x+m-1) is the rising factorial; E v^m of a Beta is that quotient.
    """
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    if m < 2:
        return np.zeros(np.broadcast_shapes(alpha.shape, beta.shape))
    steps = np.arange(m)
    total = alpha[..., None] + beta[..., None] + steps
    all_succeed = np.prod((alpha[..., None] + steps) / total, axis=-1)
    all_fail = np.prod((beta[..., None] + steps) / total, axis=-1)
    return np.asarray(1.0 - all_succeed - all_fail)


def root_values_beta(alpha: ArrayLike, beta: ArrayLike, max_roots: int) -> Floats:
    """E V_root [C, max_roots + 1] for each belief alpha [C], beta [C]. Raises ValueError unless both are positive."""
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    if alpha.ndim != 1 or alpha.shape != beta.shape or not ((alpha > 0.0) & (beta > 0.0)).all():
        raise ValueError(f"beliefs must be two equal rows of positive numbers, got {alpha} and {beta}")
    return np.stack([root_value_beta(alpha, beta, m) for m in range(max_roots + 1)], axis=1)


# ---- roots -------------------------------------------------------------------------------------------------------


def allocate_roots(
    values: ArrayLike, *, budget: int, max_roots: int, rng: np.random.Generator, least: ArrayLike = 0
) -> Counts:
    """Counts int64 [C], each `least` to `max_roots`, that maximise the summed value.

    `values` [C, max_roots + 1]: worth of 0 .. max_roots rollouts (`root_values_beta`); or [C]: success probabilities.
    `least`: 0 lets a prompt go without, 1 gives every prompt one; or one count for each prompt [C].
    Exact by dynamic programming up to EXACT_CELLS, else greedy with an opening step, at most a quarter of a mixed group
    below the optimum (`_opening_heap`).
    Raises ConfigError when the budget cannot be spent exactly, ValueError for a malformed or non-finite table.
    """
    table = np.asarray(values, np.float64)
    if table.ndim == 1:
        table = root_values(table, max_roots)
    if table.ndim != 2 or table.shape[1] != max_roots + 1 or not np.isfinite(table).all():
        raise ValueError(f"need finite values [C, {max_roots + 1}] for max_roots {max_roots}, got shape {table.shape}")
    floor = np.broadcast_to(np.asarray(least, np.int64), len(table))
    check_spendable(floor, budget=budget, max_roots=max_roots)
    order = rng.permutation(len(table))  # equal prompts take turns, whichever solver decides
    exact = table.size * (budget + 1) <= EXACT_CELLS
    solve = _exact if exact else _opening_heap
    counts = np.zeros(len(table), np.int64)
    counts[order] = solve(table[order], floor[order], budget)
    return counts


def check_spendable(least: Counts, *, budget: int, max_roots: int) -> None:
    """Raises ConfigError unless `budget` can be spent exactly on prompts that get `least` [C] to `max_roots` each."""
    if max_roots < 1:
        raise ConfigError(f"tree.max_roots_per_prompt is {max_roots}; it must be at least 1")
    if least.min(initial=0) < 0 or least.max(initial=0) > max_roots:
        raise ValueError(f"least must be 0 to max_roots {max_roots} for each prompt, got {least}")
    low, high = int(least.sum()), max_roots * len(least)
    if not low <= budget <= high:
        raise ConfigError(
            f"a budget of {budget} root rollouts cannot be spent on {len(least)} prompts, which take {low} to {high} "
            f"with at most {max_roots} each; change tree.roots_per_step, tree.max_roots_per_prompt or "
            "prompts.candidates_per_round"
        )


def _exact(table: Floats, least: Counts, budget: int) -> Counts:
    """Dynamic programming: best[i + 1, b] = max over m of best[i, b - m] + value of m, for the first i + 1 prompts.

    One pass per m over all b that prompts so far can spend and later ones can complete, so that NumPy does the work;
    the choices are found again on the way back.
    """
    num_prompts, width = table.shape
    margin = most = width - 1  # columns left of budget 0, which nobody reaches
    best = np.full((num_prompts + 1, margin + budget + 1), -np.inf)
    best[0, margin] = 0.0
    scratch = np.empty(budget + 1)
    for prompt, row in enumerate(table.tolist()):
        low, high = max(0, budget - most * (num_prompts - prompt - 1)), min(budget, most * (prompt + 1))
        first, end = margin + low, margin + high + 1
        before, after, total = best[prompt], best[prompt + 1, first:end], scratch[: end - first]
        for m in range(int(least[prompt]), width):
            np.add(before[first - m : end - m], row[m], out=total)
            np.maximum(after, total, out=after)
    counts = np.zeros(num_prompts, np.int64)
    left = budget
    for prompt in reversed(range(num_prompts)):
        spent = np.arange(least[prompt], width)
        counts[prompt] = spent[np.argmax(best[prompt, margin + left - spent] + table[prompt, spent])]
        left -= int(counts[prompt])
    return counts


def _opening_heap(table: Floats, least: Counts, budget: int) -> Counts:
    """Greedy by value per rollout. A prompt without any is opened with two rollouts, since one alone is worth nothing;
    an open one grows by single rollouts. What does not fit is passed over; the last rollout goes where it adds most.

    For values of roots each pick is the steepest piece of the concave envelope (three rollouts of a prompt are worth as
    much apiece as two), so the sum is the envelope's, an upper bound, until an opening is passed over for the last
    rollout. What that loses is at most what a rollout of that opening is worth, E v(1-v) <= 1/4. [derived here]
    """
    width = table.shape[1]
    counts = least.copy()
    left = budget - int(least.sum())
    heap: list[tuple[float, int, int]] = []

    def offer(prompt: int) -> None:
        have = int(counts[prompt])
        units = min(2, width - 1) if have == 0 else 1
        if have + units < width:
            gain = float(table[prompt, have + units] - table[prompt, have])
            heapq.heappush(heap, (-gain / units, prompt, units))

    for prompt in range(len(table)):
        offer(prompt)
    while left > 0:
        if not heap:  # one rollout is left and every open prompt is full: nothing but a worthless single remains
            counts[np.flatnonzero(counts < width - 1)[:left]] += 1
            break
        _, prompt, units = heapq.heappop(heap)
        if units <= left:
            counts[prompt] += units
            left -= units
            offer(prompt)
    return counts


# ---- continuations -----------------------------------------------------------------------------------------------


def prefix_value(q: ArrayLike, k: ArrayLike) -> Floats:
    """V_pref, broadcast over q (chance that one continuation repeats the outcome seen) and k (continuations)."""
    return np.asarray(1.0 - np.asarray(q, np.float64) ** np.asarray(k, np.float64))


def repeat_probability(success: ArrayLike, succeeded: ArrayLike) -> Floats:
    """q = r u + (1-r)(1-u): u predicted success at the prefix, r whether the bare rollout through it succeeded."""
    u = np.asarray(success, np.float64)
    return np.where(np.asarray(succeeded, bool), u, 1.0 - u)


def allocate_prefixes(
    q: ArrayLike,
    *,
    budget: int,
    rng: np.random.Generator,
    granted: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    at_least: float = 0.0,
) -> Counts:
    """Continuations int64 [n] for each anchor with repeat probability q [n], maximising the summed V_pref.

    `granted` [n]: continuations an anchor already has; its next one is then worth q^granted (1-q). `cost` [n]: what a
    continuation of an anchor costs, in any unit; the choice is then by worth per cost. Taking the largest marginals is
    exactly optimal because they decrease. Sums to `budget` exactly, but continuations worth less than `at_least` are
    not given. Raises ValueError without an anchor for the budget, for a q outside [0, 1] or a cost that is not above 0.
    """
    q = np.asarray(q, np.float64)
    if q.ndim != 1 or not ((q >= 0.0) & (q <= 1.0)).all():
        raise ValueError(f"repeat probabilities must be one row of numbers in [0, 1], got shape {q.shape}: {q}")
    steps = _next_steps(granted, num_anchors=len(q), budget=budget)
    gains = q[:, None] ** steps * (1.0 - q[:, None])
    return _take_largest(gains, budget=budget, rng=rng, cost=cost, at_least=at_least)


def allocate_prefixes_beta(
    repeat: ArrayLike,
    flip: ArrayLike,
    *,
    budget: int,
    rng: np.random.Generator,
    granted: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    at_least: float = 0.0,
) -> Counts:
    """`allocate_prefixes` for q ~ Beta(repeat [n], flip [n]); raises ValueError unless both are positive.

    With belief Beta(a, b) of success that is (a, b) after a success and (b, a) after a failure. E q^k (1-q) =
    (repeat)_k flip / (repeat + flip)_(k+1), with rising factorials.
    """
    a, b = np.asarray(repeat, np.float64), np.asarray(flip, np.float64)
    if a.ndim != 1 or a.shape != b.shape or not ((a > 0.0) & (b > 0.0)).all():
        raise ValueError(f"beliefs must be two equal rows of positive numbers, got {a} and {b}")
    steps = _next_steps(granted, num_anchors=len(a), budget=budget)
    total = (a + b)[:, None] + np.arange(steps.max(initial=0) + 1)
    repeats = np.cumprod((total - b[:, None]) / total, axis=1)  # E q^(k+1) at column k
    moments = np.concatenate([np.ones((len(a), 1)), repeats[:, :-1]], axis=1)
    gains = np.take_along_axis(moments * b[:, None] / total, steps, axis=1)
    return _take_largest(gains, budget=budget, rng=rng, cost=cost, at_least=at_least)


def _next_steps(granted: ArrayLike | None, *, num_anchors: int, budget: int) -> Counts:
    """[n, budget]: how many continuations an anchor has when it gets its next one, the one after, and so on."""
    have = np.zeros(num_anchors, np.int64) if granted is None else np.asarray(granted, np.int64)
    if have.shape != (num_anchors,) or (have < 0).any():
        raise ValueError(f"granted must be {num_anchors} counts >= 0, got {have}")
    if budget < 0 or (budget > 0 and num_anchors == 0):
        raise ValueError(f"a budget of {budget} continuations cannot be spent on {num_anchors} anchors")
    return have[:, None] + np.arange(budget)


def _take_largest(
    gains: Floats, *, budget: int, rng: np.random.Generator, cost: ArrayLike | None, at_least: float
) -> Counts:
    """How many of the `budget` largest marginals per cost lie in each row; rows never increase, ties are drawn."""
    worth = gains
    if cost is not None:
        costs = np.asarray(cost, np.float64)
        if costs.shape != (len(gains),) or not (costs > 0.0).all():
            raise ValueError(f"costs must be {len(gains)} positive numbers, got {costs}")
        worth = gains / costs[:, None]
    ranking = np.lexsort((rng.random(gains.size), -worth.ravel()))
    taken = ranking[gains.ravel()[ranking] >= at_least][:budget]  # what is worth too little keeps no place from others
    return np.bincount(taken // max(budget, 1), minlength=len(gains)).astype(np.int64)
