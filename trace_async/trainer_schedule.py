"""The learning rate of an optimizer update: warm-up, schedule, and the brake for old data.

Pure functions of the configuration, the step's number and what the update saw. Never touches an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trace_async.config import LearnerConfig


def scheduled_rate(learner: LearnerConfig, *, step: int) -> float:
    """The learning rate of training step number `step`, the first is 0; at and after `max_steps` it stays as it is.

    Linear warm-up to `learning_rate` over `warmup_steps`, times the schedule: 1 (constant), a straight line from 1 at
    step 0 to `decay_to` at `max_steps` (linear), or half a cosine between the same ends (arXiv 1608.03983).
    """
    rise = min(1.0, (step + 1) / learner.warmup_steps) if learner.warmup_steps else 1.0
    done = min(1.0, step / learner.max_steps)
    match learner.schedule:
        case "constant":
            fallen = 0.0
        case "cosine":
            fallen = 0.5 * (1.0 - math.cos(math.pi * done))
        case _:
            fallen = done
    return learner.learning_rate * rise * (1.0 + (learner.decay_to - 1.0) * fallen)


def ess_factor(weights: Sequence[float]) -> float:
    """sqrt(min(1, ESS / B)) of the turns' weights in an update; VCPO, arXiv 2602.17616.

    `weights`: number of turns B, sum of their weights, sum of squares, as `ObjectiveStats.weights`. ESS = (sum)^2 / sum
    of squares (A. Kong, 1992), so on-policy data gives 1 and data of which one turn in four counts gives 1/2. Without
    any turn it is 1: there is nothing to brake.
    """
    count, total, squares = weights
    if count <= 0 or squares <= 0:
        return 1.0
    return math.sqrt(min(1.0, total * total / (squares * count)))
