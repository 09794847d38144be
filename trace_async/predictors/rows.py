"""How a learned predictor sees a prefix: the interface of what `hashed` and `embedding` differ in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from trace_async.core.types import FloatArray, Prefix

Row: TypeAlias = NDArray[Any]
"""What is kept of one prefix, [any length]; what it means is the input layer's own."""


class InputLayer(Protocol):
    """Turns rows into numbers, by a table of parameters or by none."""

    @property
    def width(self) -> int:
        """Numbers per row."""
        ...

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """Shape of the table; None for a layer without one."""
        ...

    def read(self, rows: Sequence[Row]) -> Any:
        """The rows in the form that the other two want."""
        ...

    def forward(self, inputs: Any, table: FloatArray | None) -> FloatArray:
        """float32 [rows, width], each row as if it were alone."""
        ...

    def backward(self, inputs: Any, gradient: FloatArray) -> FloatArray | None:
        """Gradient of the table for that of `forward`'s answer; None for a layer without one."""
        ...


class RowMaker(Protocol):
    """Makes the rows of prefixes, and the layer that reads them."""

    @property
    def layer(self) -> InputLayer:
        """What reads the rows."""
        ...

    @property
    def dtype(self) -> str:
        """Of every row."""
        ...

    @property
    def quick_batch(self) -> int:
        """As that of a predictor."""
        ...

    def make(self, prefixes: Sequence[Prefix]) -> list[Row]:
        """A row for each prefix; depends on its tokens only."""
        ...
