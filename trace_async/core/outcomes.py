"""What counts as success where outcomes are graded.

Owns the one comparison behind prediction, allocation, metrics and evaluation. Invariant: it is made in float32, as
outcomes travel, so an outcome is judged alike before and after the wire, and one that equals the threshold but for the
rounding of summed rewards is no success. Never changes an outcome: credit and loss use them as they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def is_success(outcomes: ArrayLike, above: float) -> NDArray[np.bool_]:
    """Whether each outcome is above the threshold, in the shape given; NaN (no outcome) is not."""
    return np.asarray(np.asarray(outcomes, np.float32) > np.float32(above))
