"""`general.*` keys: name, size, file type, and what the model card and generation config say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
from gguf.constants import GGML_QUANT_VERSION


def add_general_keys(
    writer: gguf.GGUFWriter, folder: Path, file_type: gguf.LlamaFileType, notes: Counter[str]
) -> None:
    """Adds the keys; the writer has to know all tensors already (the size label counts them)."""
    total, shared, expert, experts = writer.get_total_parameter_count()
    try:
        metadata = gguf.Metadata.load(None, folder.resolve(), None, total)
    except Exception as error:  # a malformed model card, in whatever way yaml reports it
        notes[f"model card ignored: {str(error).splitlines()[0]}"] += 1
        metadata = gguf.Metadata()
    if metadata.name is None:
        metadata.name = folder.resolve().name
    if metadata.size_label is None:
        metadata.size_label = gguf.size_label(total, shared, expert, experts)
    writer.add_type(gguf.GGUFType.MODEL)
    metadata.set_gguf_meta_model(writer)
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
