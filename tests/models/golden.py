"""The stored results of a recipe; tools/make_golden.py says what each entry holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.tiny_recipes import RECIPES

MODELS = (*RECIPES, "prose")
"""The tiny models and the shipped one, for what must hold in each."""
FOLDER = Path(__file__).parent / "golden"
SEQUENCES = ("long", "short", "one")


class Golden:
    """Arrays by name, and `meta`."""

    def __init__(self, name: str) -> None:
        self.path = FOLDER / f"{name}.npz"
        with np.load(self.path, allow_pickle=False) as f:
            self.arrays: dict[str, np.ndarray] = {k: f[k] for k in f.files}
        self.meta: dict[str, Any] = json.loads(str(self.arrays.pop("meta")))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def tokens(self, sequence: str) -> list[int]:
        if sequence == "long" and "tokens" in self.arrays:  # of the shipped model: a whole text
            return [int(t) for t in self["tokens"][:190]]
        return [int(t) for t in self[sequence + ".tokens"]]

    def taps(self) -> dict[str, np.ndarray]:
        """tap name -> [Q, width] at `long.tap_positions`"""
        skip = ("long.tap_positions", "long.tokens", "long.positions", "long.logits")
        widths = ("attn_out", "ffn_out", "residual", "result_norm")
        return {
            k.removeprefix("long."): v
            for k, v in self.arrays.items()
            if k.startswith("long.") and k.endswith(widths) and k not in skip
        }
