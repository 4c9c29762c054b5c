"""Text to token ids and back, from the tokenizer keys of a GGUF file."""

from imp_runtime.tokenizer.stream import StreamDecoder
from imp_runtime.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
