"""The lines of llama-perplexity, so that scripts which read its logs read these."""

from collections.abc import Callable, Iterator

import numpy as np

from ..eval.kl_divergence import KldResult
from ..eval.kld_stats import MIN_COUNT_FOR_STATISTICS, Estimate, KldTotals, median, percentile
from ..eval.perplexity import PerplexityResult, Window
from ..eval.windows import Plan

CHUNK_HEADER = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
    "              Δp RMS            Same top p"
)
TAILS = (0.999, 0.99, 0.95, 0.90)
QUARTILE = 0.75


class Passes:
    """Holds lines back until the first pass is timed, as passes of several windows are."""

    def __init__(self, plan: Plan, print_time: Callable[[float], None]) -> None:
        """Print the time of the first pass of ``plan`` with ``print_time(seconds)``."""
        self._first = min(plan.n_seq, plan.n_chunks)
        self._print_time = print_time
        self._held: list[Callable[[], None]] = []
        self._seconds = 0.0

    def add(self, index: int, seconds: float, print_line: Callable[[], None]) -> None:
        """Window ``index`` took ``seconds``; its line is printed now or after the first pass."""
        self._held.append(print_line)
        self._seconds += seconds
        if index + 1 < self._first:
            return
        if index + 1 == self._first:
            self._print_time(self._seconds)
        for print_held in self._held:
            print_held()
        self._held.clear()


def pass_time(name: str, seconds: float, plan: Plan) -> str:
    """`name: S seconds per pass - ETA H hours M minutes`."""
    total = int(seconds * plan.n_chunks / plan.n_seq)
    hours = f"{total // 3600} hours " if total >= 3600 else ""
    minutes = total % 3600 / 60
    return f"{name}: {seconds:.2f} seconds per pass - ETA {hours}{minutes:.2f} minutes"


def running(window: Window) -> str:
    """`[1]4.1234,` without a newline."""
    return f"[{window.index + 1}]{window.ppl:.4f},"


def table_row(window: Window, plan: Plan, strided: bool) -> str:
    """A row of `--ppl-output-type 1`: first token, perplexity, mean nll and its uncertainty."""
    if strided:
        return f"{window.start:8d}  {window.ppl:.4f}"
    pass_start = window.index // plan.n_seq * plan.n_seq * plan.n_ctx
    return f"{pass_start:8d}  {window.ppl:.4f}  {window.mean_nll:4f}  {window.uncertainty:4f}"


def final_estimate(result: PerplexityResult, score_from: int | None) -> str:
    """`Final estimate: PPL = 4.1234 +/- 0.12345`, and the first position if it was chosen."""
    where = "" if score_from is None else f", positions from {score_from} of each window"
    return f"Final estimate: PPL = {result.ppl:.4f} +/- {result.uncertainty:.5f}{where}"


def kld_row(index: int, totals: KldTotals) -> str:
    """One row of the table under `CHUNK_HEADER`."""
    rms, top = totals.p_diff_rms, totals.same_top
    return (
        f"{index + 1:4d}"
        f"    {totals.ppl.value:9.4f} ± {totals.ppl.error:9.4f}"
        f"    {totals.ln_ratio.value:10.5f} ± {totals.ln_ratio.error:10.5f}"
        f"    {totals.kld.value:10.5f} ± {totals.kld.error:10.5f}"
        f"    {100 * rms.value:6.3f} ± {100 * rms.error:6.3f} %"
        f"    {100 * top.value:6.3f} ± {100 * top.error:6.3f} %"
    )


def kld_statistics(result: KldResult) -> Iterator[str]:
    """The closing blocks; nothing below `MIN_COUNT_FOR_STATISTICS` positions."""
    totals = result.totals
    if totals.count < MIN_COUNT_FOR_STATISTICS:
        return
    yield "====== Perplexity statistics ======"
    yield f"Mean PPL(Q)                   : {_six(totals.ppl)}"
    yield f"Mean PPL(base)                : {_six(totals.ppl_base)}"
    yield f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * totals.correlation:6.2f}%"
    yield f"Mean ln(PPL(Q)/PPL(base))     : {_six(totals.ln_ratio)}"
    yield f"Mean PPL(Q)/PPL(base)         : {_six(totals.ratio)}"
    yield f"Mean PPL(Q)-PPL(base)         : {_six(totals.difference)}"
    yield ""
    yield "====== KL divergence statistics ======"
    kld = np.sort(result.kld)
    yield f"Mean    KLD: {_six(totals.kld)}"
    yield f"Maximum KLD: {kld[-1]:10.6f}"
    for fraction in TAILS:
        yield f"{100 * fraction:4.1f}%   KLD: {percentile(kld, fraction):10.6f}"
    yield f"Median  KLD: {median(kld):10.6f}"
    for fraction in reversed(TAILS):
        yield f"{100 * (1 - fraction):4.1f}%   KLD: {percentile(kld, 1 - fraction):10.6f}"
    yield f"Minimum KLD: {kld[0]:10.6f}"
    yield ""
    yield "====== Token probability statistics ======"
    p_diff = np.sort(result.p_diff)
    yield f"Mean    Δp: {_percent(totals.p_diff)}"
    yield f"Maximum Δp: {100 * p_diff[-1]:6.3f}%"
    for fraction in (*TAILS, QUARTILE):
        yield f"{100 * fraction:4.1f}%   Δp: {100 * percentile(p_diff, fraction):6.3f}%"
    yield f"Median  Δp: {100 * median(p_diff):6.3f}%"
    for fraction in (QUARTILE, *reversed(TAILS)):
        yield f"{100 * (1 - fraction):4.1f}%   Δp: {100 * percentile(p_diff, 1 - fraction):6.3f}%"
    yield f"Minimum Δp: {100 * p_diff[0]:6.3f}%"
    yield f"RMS Δp    : {_percent(totals.p_diff_rms)}"
    yield f"Same top p: {_percent(totals.same_top)}"


def _six(estimate: Estimate) -> str:
    return f"{estimate.value:10.6f} ± {estimate.error:10.6f}"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:6.3f} ± {100 * estimate.error:5.3f} %"
