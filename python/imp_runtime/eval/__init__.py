"""Scoring a model: perplexity, KL divergence from a stored run, comparison of intermediates."""

from .errors import EvalError, LogitsFileError, NotFiniteError
from .kl_divergence import KldOptions, KldResult, KldWindow, kl_divergence
from .kld import KldBase, KldWriter, write_kld
from .kld_stats import Estimate, KldTotals
from .perplexity import PerplexityOptions, PerplexityResult, Window, perplexity

__all__ = [
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
    "Window",
    "kl_divergence",
    "perplexity",
    "write_kld",
]
