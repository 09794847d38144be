"""How long a start-up probe of a model must be, and whether two ways of computing its logits agree.

Batches, reused key/values and packed trees are only right for models whose attention depends on nothing but masks and
positions. Models differ in that (sliding windows, chunked attention, learned positions, recurrent states), so whoever
rearranges tokens compares itself with a plain forward pass before it is used. Importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SHORT = 16
_PAST_WINDOW = 8
_TOLERANCE = 1e-3
_WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "window_size")


def attention_window(config: Any) -> int | None:
    """Tokens that some layer's attention is limited to, from a transformers config; None where all see everything."""
    text = config.get_text_config()
    if getattr(text, "use_sliding_window", True) is False:
        return None
    windows = [getattr(text, key, None) for key in _WINDOW_KEYS]
    return min((window for window in windows if isinstance(window, int) and window > 0), default=None)


def probe_tokens(config: Any, *, limit: int) -> list[int]:
    """A fixed token sequence: longer than the attention window where contexts of `limit` tokens can be, else short."""
    window = attention_window(config)
    wanted = _SHORT if window is None or window >= limit else max(_SHORT, window + _PAST_WINDOW)
    vocabulary = config.get_text_config().vocab_size
    return [(7 + 31 * index + index * index) % vocabulary for index in range(max(4, min(limit, wanted)))]


def logits_agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two logits [vocabulary] agree to 1e-3, less where they are nearly flat, as those of new weights are."""
    spread = float(expected.float().std())
    worst = float((found.float() - expected.float()).abs().max())
    return worst <= _TOLERANCE * min(1.0, spread)  # False for NaN
