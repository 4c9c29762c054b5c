"""Means, uncertainties and percentiles of a comparison, as llama-perplexity defines them."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .contracts import Float32, Float64
from .numerics import exp_or_inf

# Fewer positions than this get no closing statistics.
MIN_COUNT_FOR_STATISTICS = 100
# Fewer positions than this give a mean no error.
MIN_COUNT_FOR_ERROR = 11
# Fewer positions than this have no covariance.
MIN_COUNT_FOR_COVARIANCE = 10


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class KldTotals:
    """Statistics of the positions scored so far.

    Attributes:
        count: scored positions.
        ppl, ppl_base: perplexities of the model and of the base.
        correlation: of the log-probabilities of the two, NaN if either does not vary.
        ln_ratio, ratio, difference: of the perplexities, model to base.
        kld: mean KL divergence in nats.
        p_diff, p_diff_rms: mean and root mean square of p - p_base of the actual token.
        same_top: share of positions where both put the same token first.

    """

    count: int
    ppl: Estimate
    ppl_base: Estimate
    correlation: float
    ln_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    kld: Estimate
    p_diff: Estimate
    p_diff_rms: Estimate
    same_top: Estimate


class Tally:
    """Running sums, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.same_top = 0
        self._sums = dict.fromkeys(
            ("nll", "nll2", "base", "base2", "both", "kld", "kld2", "dp", "dp2", "dp4"), 0.0
        )

    def add(
        self,
        nll: Float32,
        nll_base: Float32,
        kld: Float64,
        p_diff: Float32,
        same_top: npt.NDArray[np.bool_],
    ) -> None:
        """Take in n positions; products are float32, as in llama.cpp, sums float64."""
        p_diff2 = (p_diff * p_diff).astype(np.float64)
        for name, values in (
            ("nll", nll),
            ("nll2", nll * nll),
            ("base", nll_base),
            ("base2", nll_base * nll_base),
            ("both", nll * nll_base),
            ("kld", kld),
            ("kld2", kld * kld),
            ("dp", p_diff),
            ("dp2", p_diff2),
            ("dp4", p_diff2 * p_diff2),
        ):
            self._sums[name] += float(values.sum(dtype=np.float64))
        self.count += len(nll)
        self.same_top += int(same_top.sum())

    def totals(self) -> KldTotals:
        """The statistics of everything taken in; at least one position."""
        sums, count = self._sums, self.count
        log_ppl = _mean(sums["nll"], sums["nll2"], count)
        log_base = _mean(sums["base"], sums["base2"], count)
        covariance = 0.0
        if count >= MIN_COUNT_FOR_COVARIANCE:
            covariance = sums["both"] / count - (sums["nll"] / count) * (sums["base"] / count)
            covariance /= count - 1
        ppl = _exp(log_ppl)
        base = _exp(log_base)
        ln_ratio = Estimate(
            log_ppl.value - log_base.value, _difference_error(log_ppl, log_base, covariance)
        )
        spread = log_ppl.error * log_base.error
        mse = _mean(sums["dp2"], sums["dp4"], count)
        rms = math.sqrt(mse.value)
        top = self.same_top / count
        return KldTotals(
            count=count,
            ppl=ppl,
            ppl_base=base,
            correlation=covariance / spread if spread > 0 else math.nan,
            ln_ratio=ln_ratio,
            ratio=_exp(ln_ratio),
            difference=Estimate(
                ppl.value - base.value,
                _difference_error(ppl, base, ppl.value * base.value * covariance),
            ),
            kld=_mean(sums["kld"], sums["kld2"], count),
            p_diff=_mean(sums["dp"], sums["dp2"], count),
            p_diff_rms=Estimate(rms, 0.5 / rms * mse.error if rms > 0 else 0.0),
            same_top=Estimate(
                top, math.sqrt(top * (1 - top) / (count - 1)) if count > 1 else math.nan
            ),
        )


def percentile(ordered: Float32, fraction: float) -> float:
    """Linear interpolation at ``fraction * (n - 1)`` of sorted float32 [n]."""
    place = np.float32(fraction) * np.float32(len(ordered) - 1)
    index = int(place)
    weight = place - np.float32(index)
    above = ordered[min(index + 1, len(ordered) - 1)]
    return float((1 - weight) * ordered[index] + weight * above)


def median(ordered: Float32) -> float:
    """The middle of sorted float32 [n], or the mean of the two middle ones."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[half])
    return float(np.float32(0.5) * (ordered[half] + ordered[half - 1]))


def _mean(total: float, total_of_squares: float, count: int) -> Estimate:
    """Mean of ``count`` values; its error is 0 below `MIN_COUNT_FOR_ERROR`."""
    mean = total / count
    variance = total_of_squares / count - mean * mean
    if variance <= 0 or count < MIN_COUNT_FOR_ERROR:
        return Estimate(mean, 0.0)
    return Estimate(mean, math.sqrt(variance / (count - 1)))


def _exp(log_value: Estimate) -> Estimate:
    value = exp_or_inf(log_value.value)
    return Estimate(value, value * log_value.error)


def _difference_error(a: Estimate, b: Estimate, covariance: float) -> float:
    return math.sqrt(max(a.error**2 + b.error**2 - 2 * covariance, 0.0))
