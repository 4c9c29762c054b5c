"""How far two sets of values may be apart, by the type that one of them was rounded to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from imp_runtime.convert.verify_places import Place

F32 = NDArray[np.float32]

# Half a unit in the last place, relative, and half of the smallest step, absolute.
RELATIVE = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-22}  # F32: of an exponential
ABSOLUTE = {"BF16": 2.0**-134, "F16": 2.0**-25, "F32": 0.0}
# Q8_0: half a step of (largest of 32) / 127, and that step itself is kept as F16.
Q8_0_BLOCK = 32
Q8_0_RELATIVE = 0.5 / 127 + 2.0**-11
Q8_0_ABSOLUTE = 128 * 2.0**-25


def allowed(kind: str, wanted: F32) -> F32:
    """Largest rounding error of `wanted` in GGUF type `kind`, float32 of the same shape."""
    size = np.abs(wanted)
    if kind == "Q8_0":
        blocks = size.reshape(len(size), -1, Q8_0_BLOCK).max(axis=2) * np.float32(Q8_0_RELATIVE)
        return np.repeat(blocks + np.float32(Q8_0_ABSOLUTE), Q8_0_BLOCK, axis=1)
    return size * np.float32(RELATIVE[kind]) + np.float32(ABSOLUTE[kind])


def difference(place: Place, kind: str, wanted: F32, got: F32, *, exact: bool) -> str | None:
    """A sentence about the first value that is too far off, None if there is none."""
    if exact:
        if np.array_equal(got, wanted):
            return None
        bad = got != wanted
        limit = np.zeros_like(wanted)
    else:
        limit = allowed(kind, wanted)
        bad = ~(np.abs(got - wanted) <= limit)  # NaN is bad too
        if not bad.any():
            return None
    row, col = (int(i[0]) for i in np.nonzero(bad))
    return (
        f"{place.tensor} row {place.target_row + row} column {place.first_col + col} is "
        f"{got[row, col]:.9g}, the source has {wanted[row, col]:.9g} "
        f"(difference allowed: {limit[row, col]:.3g}; {int(bad.sum())} such values here)"
    )
