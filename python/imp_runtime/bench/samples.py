"""Repeated measurements of one time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return statistics.fmean(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); 0 of fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def median(values: Sequence[float]) -> float:
    """Median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


def rate(count: float, seconds: float) -> float:
    """Things per second; 0 if nothing was counted or no time passed."""
    return count / seconds if count and seconds > 0 else 0.0
