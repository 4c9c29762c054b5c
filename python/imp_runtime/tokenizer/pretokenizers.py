"""The pre-tokenizers of byte-level BPE by their GGUF name (`tokenizer.ggml.pre`).

Each is the list of splits that the model's own tokenizer.json applies, in order; a name that is not
in the table is refused, because a wrong split gives wrong ids without any other sign.
"""

from dataclasses import dataclass

from imp_runtime.errors import ImpError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
# Marks count as letters, so that scripts written with combining marks keep their words whole.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before the merges run."""

    patterns: tuple[str, ...]
    nfc: bool = False  # normalise to NFC first
    ignore_merges: bool = False  # a piece that is in the vocabulary is taken whole
    add_bos: bool = False  # when the file does not say


_TABLE = {
    ("qwen35",): PreTokenizer((_QWEN35,), nfc=True),
    ("qwen2", "deepseek-r1-qwen"): PreTokenizer((_QWEN2,), nfc=True),
    ("llama-bpe", "llama3", "llama-v3"): PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe"): PreTokenizer((_LLAMA3,)),
    ("glm4",): PreTokenizer((_LLAMA3,), ignore_merges=True),
    ("gpt-2", "phi-2", "mpt", "olmo"): PreTokenizer((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r"): PreTokenizer((r"\p{N}", _GPT2)),
    ("deepseek-v3",): PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ("deepseek-coder",): PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
}
PRE_TOKENIZERS = {name: entry for names, entry in _TABLE.items() for name in names}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The entry for a `tokenizer.ggml.pre` value.

    Raises:
        ImpError: the name is absent or unknown.
    """
    if name is None:
        raise ImpError("the file has no tokenizer.ggml.pre, so its text cannot be split as trained")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ImpError(f"tokenizer.ggml.pre is {name!r}, which is not supported (known: {known})")
    return PRE_TOKENIZERS[name]
