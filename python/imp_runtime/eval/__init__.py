"""Scoring a model: perplexity, KL divergence from a stored run, comparison of intermediates."""

from .diff import DiffReport, TapDiff, TapRun, diff, load_run, record, save_run
from .errors import EvalError, LogitsFileError, NotFiniteError
from .kl_divergence import KldOptions, KldResult, KldWindow, kl_divergence
from .kld import KldBase, KldWriter, write_kld
from .kld_stats import Estimate, KldTotals
from .perplexity import PerplexityOptions, PerplexityResult, Window, perplexity

__all__ = [
    "DiffReport",
    "Estimate",
    "EvalError",
    "KldBase",
    "KldOptions",
    "KldResult",
    "KldTotals",
    "KldWindow",
    "KldWriter",
    "LogitsFileError",
    "NotFiniteError",
    "PerplexityOptions",
    "PerplexityResult",
    "TapDiff",
    "TapRun",
    "Window",
    "diff",
    "kl_divergence",
    "load_run",
    "perplexity",
    "record",
    "save_run",
    "write_kld",
]
