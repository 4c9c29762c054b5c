"""What a conversion will write: every tensor with its source, type and bytes, checked beforehand.

The tensors come from the architecture's own table (`_core.tensor_table`), so that a converted file
has exactly what the loader requires.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from imp_runtime.convert.checkpoint import Checkpoint, TensorRef
from imp_runtime.convert.config import ModelConfig
from imp_runtime.convert.ngram import HashConstants
from imp_runtime.convert.options import ConvertOptions
from imp_runtime.convert.views import View

TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0}
FILE_TYPES = {
    Type.F32: LlamaFileType.ALL_F32,
    Type.F16: LlamaFileType.MOSTLY_F16,
    Type.BF16: LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}


@dataclass
class Output:
    """One tensor of the result.

    dims: fastest first, as GGUF stores them.
    view: its rows, [prod(dims[1:]), dims[0]] (or any other shape with the same order of elements).
    role: role in the architecture's table, `scale` for scales.
    scheme: how the checkpoint stores it.
    """

    name: str
    dims: tuple[int, ...]
    type: Type
    view: View
    role: str
    scheme: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return prod(self.dims) // block * size


@dataclass
class ConvertPlan:
    """A checked conversion. Close it (or use it as a context manager) to release the files.

    group_scales: block scales whose values are still to be looked at.
    constants: hash constants, one per n-gram layer.
    schemes: how many modules the checkpoint holds in each scheme.
    notes: what was decided without being asked, one line each.
    """

    source: Path
    options: ConvertOptions
    config: ModelConfig
    checkpoint: Checkpoint
    writer: gguf.GGUFWriter
    outputs: list[Output]
    constants: list[HashConstants]
    mtp: bool
    schemes: Counter[str]
    group_scales: list[TensorRef]
    notes: list[str] = field(default_factory=list)

    def __enter__(self) -> ConvertPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the checkpoint's files."""
        self.checkpoint.close()

    @property
    def data_bytes(self) -> int:
        """Tensor bytes of the result, with padding."""
        return sum(gguf.GGUFWriter.ggml_pad(o.nbytes, self.alignment) for o in self.outputs)

    @property
    def alignment(self) -> int:
        """Alignment of tensor data in the file, bytes."""
        return int(self.writer.data_alignment)

    def bytes_of(self, *roles: str) -> int:
        """Tensor bytes of the given roles."""
        return sum(o.nbytes for o in self.outputs if o.role in roles)


def schemes_seen(plan: ConvertPlan) -> dict[str, int]:
    """How many modules of the checkpoint are stored in each scheme."""
    return dict(plan.schemes)


def file_type(outputs: Sequence[Output], dense: Type) -> LlamaFileType:
    """`general.file_type`, as llama.cpp's converter chooses it."""
    if dense is not Type.Q8_0 and any(o.type is Type.NVFP4 for o in outputs):
        return LlamaFileType.MOSTLY_NVFP4
    return FILE_TYPES[dense]
