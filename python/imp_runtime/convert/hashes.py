"""The hash constants of a checkpoint, checked against what its configuration implies."""

from __future__ import annotations

from imp_runtime.convert.config import ModelConfig
from imp_runtime.convert.ngram import HashConstants, derive
from imp_runtime.convert.schemes import Sources


def hash_constants(sources: Sources, config: ModelConfig, index: int, layer: int) -> HashConstants:
    """Constants of the `index`-th n-gram layer: the checkpoint's, or derived where it has none.

    A checkpoint that contradicts the derivation is a problem that names both values.
    """
    derived = derive(
        vocab_size=config.vocab_size,
        seed=config.ngram_seed,
        ngram_size=config.ngram_size,
        heads_per_ngram=config.heads_per_ngram,
        base=config.ngram_base,
        index=index,
    )
    prefix = f"layers.{layer}.ple.ple_embedding."
    for name, wanted in (
        ("layer_multipliers", derived.multipliers),
        ("ngram_heads_vocab_sizes", derived.vocab_sizes),
        ("ngram_heads_offsets", derived.offsets),
    ):
        stored = sources.take_integers(prefix + name, len(wanted))
        if stored is not None and stored != wanted:
            at = next(i for i, (a, b) in enumerate(zip(stored, wanted, strict=True)) if a != b)
            sources.problems.add(
                f"{prefix}{name}[{at}] is {stored[at]}, config.json implies {wanted[at]}"
            )
    return derived
