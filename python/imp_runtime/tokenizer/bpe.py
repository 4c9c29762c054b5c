"""Byte-level BPE: the GPT-2 byte alphabet, and the encoder built with the `tokenizers` library."""

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from imp_runtime.errors import ImpError
from imp_runtime.tokenizer.pretokenizers import pre_tokenizer
from imp_runtime.tokenizer.vocab import TokenType, Vocab


def _alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the rest is moved to U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


BYTE_OF_CHAR = _alphabet()
_BYTE_CHARS = frozenset(BYTE_OF_CHAR)
_TO_LATIN1 = {ord(c): b for c, b in BYTE_OF_CHAR.items()}


def piece_bytes(piece: str) -> bytes:
    """The bytes of a piece written in the byte alphabet (other characters as UTF-8)."""
    if _BYTE_CHARS.issuperset(piece):
        return piece.translate(_TO_LATIN1).encode("latin-1")
    return b"".join(bytes([BYTE_OF_CHAR[c]]) if c in BYTE_OF_CHAR else c.encode() for c in piece)


class BpeEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocab: Vocab) -> None:
        """Build the encoder.

        Raises:
            ImpError: unknown pre-tokenizer, a merge that is malformed or names no piece, a
                piece that occurs twice.
        """
        pre = pre_tokenizer(vocab.get("pre"))
        # Added, control and padding pieces stay out, so that no merge and no whole word yields one.
        normal = vocab.ids_of(TokenType.NORMAL)
        ids = {vocab.pieces[i]: i for i in normal}
        if len(ids) != len(normal):
            twice = next(i for i in normal if ids[vocab.pieces[i]] != i)
            raise ImpError(f"tokens {twice} and {ids[vocab.pieces[twice]]} are the same piece")
        merges = [_merge(vocab, ids, n, m) for n, m in enumerate(vocab.need("merges"))]
        self._backend = Backend(
            models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges)
        )
        if pre.nfc:
            self._backend.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are plain text.

        Bytes for which the vocabulary has no token are left out, as the models' own tokenizers do
        (some vocabularies lack rare control characters).
        """
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)


def _merge(vocab: Vocab, ids: dict[str, int], number: int, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ImpError(f"tokenizer.ggml.merges[{number}] is {merge!r}, not two pieces")
    for piece in (left, right, left + right):
        if piece not in ids:
            raise ImpError(f"tokenizer.ggml.merges[{number}] needs {piece!r}, which is no token")
    return left, right
