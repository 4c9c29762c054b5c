"""SentencePiece BPE: a model built from the GGUF keys and run by the `sentencepiece` library."""

import struct

import sentencepiece

from imp_runtime.errors import ImpError
from imp_runtime.tokenizer.vocab import TokenType, Vocab

SPACE = "\u2581"
_BYTE_PIECES = 256


def byte_value(piece: str) -> int:
    """The byte that a piece such as <0x0A> stands for."""
    try:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return int(piece[3:5], 16)
    except ValueError:
        pass
    raise ImpError(f"the byte token {piece!r} is not written <0x00> to <0xFF>")


def piece_bytes(piece: str) -> bytes:
    """The bytes of an ordinary piece."""
    return piece.replace(SPACE, " ").encode()


class SpmEncoder:
    """Text without control tokens to ids; user-defined pieces are found by the library."""

    def __init__(self, vocab: Vocab) -> None:
        """Build the model.

        Raises:
            ImpError: scores missing or of another length, or a vocabulary the library refuses.
        """
        scores = vocab.need("scores")
        if len(scores) != len(vocab.pieces):
            raise ImpError(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocab.pieces)} tokens"
            )
        self._prefix = bool(vocab.get("add_space_prefix", True))
        proto = _model(vocab, scores)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError as error:
            raise ImpError(f"the SentencePiece vocabulary cannot be used: {error}") from error

    @property
    def add_space_prefix(self) -> bool:
        """Whether text starts with a space that is not in it."""
        return self._prefix

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        return [int(i) for i in self._model.encode(text)]


def _model(vocab: Vocab, scores: list[float]) -> bytes:
    """A serialized sentencepiece.ModelProto (field numbers: sentencepiece_model.proto)."""
    unknown = vocab.ids_of(TokenType.UNKNOWN)
    if vocab.unk_id is None and not unknown:
        raise ImpError("no token has the type UNKNOWN, which a SentencePiece vocabulary needs")
    unk_id = unknown[0] if vocab.unk_id is None else vocab.unk_id
    parts = []
    entries = zip(vocab.pieces, scores, vocab.types, strict=True)
    for token, (piece, score, kind) in enumerate(entries):
        if token == unk_id:  # some files give it another type
            kind = TokenType.UNKNOWN
        elif kind == TokenType.USER_DEFINED:  # stored with plain spaces
            piece = piece.replace(" ", SPACE)
        elif kind == TokenType.UNKNOWN:  # the library allows one
            kind = TokenType.UNUSED
        entry = _bytes(1, piece.encode()) + _float(2, score) + _int(3, int(kind))
        parts.append(_bytes(1, entry))
    pieces = b"".join(parts)
    byte_fallback = len(vocab.ids_of(TokenType.BYTE)) == _BYTE_PIECES
    bpe = 2
    trainer = _int(3, bpe) + _int(35, byte_fallback) + _int(40, unk_id)
    for field, value in ((41, vocab.bos_id), (42, vocab.eos_id), (43, None)):
        trainer += _int(field, -1 if value is None else value)
    normalizer = _int(3, bool(vocab.get("add_space_prefix", True)))
    normalizer += _int(4, bool(vocab.get("remove_extra_whitespaces", False))) + _int(5, True)
    charsmap = vocab.get("precompiled_charsmap")
    if charsmap is not None:
        normalizer = _bytes(2, bytes(bytearray(int(b) & 0xFF for b in charsmap))) + normalizer
    return pieces + _bytes(2, trainer) + _bytes(3, normalizer)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers as their 64-bit two's complement
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
