"""What a tensor is for, told from its GGUF name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a tensor is for."""

    EMBEDDING = "embedding"
    OUTPUT = "output"
    ATTENTION = "attention"
    RECURRENT = "delta-net / SSM"
    EXPERTS = "experts"
    SHARED_EXPERT = "shared expert"
    ROUTER = "router"
    FFN = "dense FFN"
    RESIDUAL = "residual"
    NGRAM = "n-gram"
    NGRAM_TABLE = "n-gram table"
    MTP = "MTP"
    NORM = "norm"
    VISION = "vision"
    OTHER = "other"


# Searched in this order in the name without `blk.N.`.
_RULES = [
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"^(v|mm)\.", Kind.VISION),
        (r"^nextn\.", Kind.MTP),
        (r"norm", Kind.NORM),
        (r"^(output_)?hc_", Kind.RESIDUAL),
        (r"^per_layer_token_embd\.weight(_e4m3)?$", Kind.NGRAM_TABLE),
        (r"^per_layer_token_embd\.scale$", Kind.NGRAM_TABLE),
        (r"^ple_", Kind.NGRAM),
        (r"_shexp\b", Kind.SHARED_EXPERT),
        (r"_exps\b", Kind.EXPERTS),
        (r"^(ffn_gate_inp|exp_probs_b)\b", Kind.ROUTER),
        (r"^ffn_", Kind.FFN),
        (r"^(ssm_|shortconv\.|time_mix_|channel_mix_)", Kind.RECURRENT),
        (r"^(attn_|indexer\.)", Kind.ATTENTION),
        (r"^(token_embd|token_types|position_embd)", Kind.EMBEDDING),
        (r"^output\b", Kind.OUTPUT),
    )
]
_LAYER = re.compile(r"^blk\.(\d{1,9})\.(.*)$", re.DOTALL)
# Belong to a weight; not parameters of the model.
_SCALES = (".scale", ".input_scale")
# Projections of a delta-net that carry an attention's names.
_DELTA_NET = re.compile(r"^attn_(qkv|gate)\.")


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of another one."""
    return name.endswith(_SCALES)


def split_layer(name: str) -> tuple[int | None, str]:
    """`blk.3.attn_q.weight` -> (3, `attn_q.weight`); (None, name) outside the layers."""
    match = _LAYER.match(name)
    return (int(match[1]), match[2]) if match else (None, name)


@dataclass(frozen=True)
class Layout:
    """Facts of a file that a tensor's name alone does not tell."""

    recurrent: frozenset[int]
    """Layers with a recurrent state."""
    mtp_from: int | None
    """First MTP layer, if there is one."""
    has_ngram: bool
    """Whether `per_layer_token_embd` is an n-gram table, not one of token ids."""

    def kind(self, name: str) -> Kind:
        """What the tensor is for."""
        layer, rest = split_layer(name)
        if layer is not None and self.mtp_from is not None and layer >= self.mtp_from:
            return Kind.MTP
        if layer in self.recurrent and _DELTA_NET.match(rest):
            return Kind.RECURRENT
        for pattern, kind in _RULES:
            if pattern.search(rest):
                if kind is Kind.NGRAM_TABLE and not self.has_ngram:
                    return Kind.EMBEDDING
                return kind
        return Kind.OTHER
