"""What a caller may choose about a conversion."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from imp_runtime.convert.errors import ConvertError

Dense = Literal["bf16", "f16", "f32", "q8_0"]
NgramChoice = Literal["auto", "fp8", "bf16", "f16", "f32", "q8_0"]
ExpertsChoice = Literal["keep", "bf16", "f16", "f32", "q8_0"]
MtpChoice = Literal["auto", "require", "drop"]

_SIZE = re.compile(r"(\d+)([MG])")


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `convert` and `plan`; the defaults lose nothing of an NVFP4 release.

    dense: type of every linear map that is not a routed expert.
    ngram: type of the n-gram table; `auto` keeps it as stored (FP8, F32, F16), else BF16.
    experts: type of routed experts that are not NVFP4 (those always move bit for bit); `keep`
        leaves BF16, F16 and F32 as they are and rounds FP8 to BF16.
    mtp: `auto` leaves an absent or incomplete MTP head out, `require` refuses then, `drop` always
        leaves it out.
    pre: pre-tokenizer name, for tokenizers that are not recognised.
    split_max_bytes: largest tensor data of one file, 0 for a single file.
    force: replace an existing output.
    verify: re-open the result and compare every value with the source.
    """

    dense: Dense = "bf16"
    ngram: NgramChoice = "auto"
    experts: ExpertsChoice = "keep"
    mtp: MtpChoice = "auto"
    pre: str | None = None
    split_max_bytes: int = 0
    force: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        """Raises ConvertError on a value outside the lists above."""
        for name, choices in (
            ("dense", get_args(Dense)),
            ("ngram", get_args(NgramChoice)),
            ("experts", get_args(ExpertsChoice)),
            ("mtp", get_args(MtpChoice)),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ConvertError(f"--{name} {value}: one of {', '.join(choices)} is needed")
        if self.split_max_bytes < 0:
            raise ConvertError(f"split_max_bytes is {self.split_max_bytes}, 0 or more is needed")


def parse_size(text: str) -> int:
    """Bytes of `500M` or `2G` (decimal units, as llama.cpp's --split-max-size).

    Raises:
        ConvertError: for anything else, and for zero.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ConvertError(
            f"--split-max-size {text}: a number followed by M or G, such as 500M or 2G"
        )
    return int(match[1]) * (1_000_000 if match[2] == "M" else 1_000_000_000)
