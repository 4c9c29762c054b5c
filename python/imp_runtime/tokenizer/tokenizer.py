"""The tokenizer of a model file."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from imp_runtime.errors import ImpError
from imp_runtime.tokenizer import bpe, spm
from imp_runtime.tokenizer.pretokenizers import pre_tokenizer
from imp_runtime.tokenizer.vocab import TokenType, Vocab


class _Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """Text to ids and back.

    Differences to llama.cpp, on purpose: Qwen text is normalised to NFC first, as its own tokenizer
    does, and special tokens are found leftmost first, the longest of those that start there.
    """

    def __init__(self, keys: Mapping[str, Any]) -> None:
        """Build the tokenizer from the keys of a GGUF file.

        Args:
            keys: name to value; arrays are sequences.

        Raises:
            ImpError: the file has no tokenizer, an unsupported or a damaged one.
        """
        model = keys.get("tokenizer.ggml.model")
        self._vocab = vocab = Vocab(keys)
        self._encoder: _Encoder
        if model == "gpt2":
            self._encoder = bpe.BpeEncoder(vocab)
            default_bos = pre_tokenizer(vocab.get("pre")).add_bos
        elif model == "llama":
            self._encoder = spm.SpmEncoder(vocab)
            default_bos = True
        else:
            raise ImpError(f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' and 'llama'")
        self._spm = model == "llama"
        self.add_bos = bool(vocab.get("add_bos_token", default_bos))
        self.add_eos = bool(vocab.get("add_eos_token", False))
        for flag, token in (("bos", vocab.bos_id), ("eos", vocab.eos_id)):
            if token is None and bool(vocab.get(f"add_{flag}_token", False)):
                raise ImpError(
                    f"tokenizer.ggml.add_{flag}_token is set, but there is no {flag}_token_id"
                )
        self._bytes = self._all_bytes()
        self._special = frozenset(vocab.ids_of(TokenType.CONTROL, TokenType.UNKNOWN))
        # The SentencePiece library finds user-defined pieces by itself.
        user = [] if self._spm else vocab.ids_of(TokenType.USER_DEFINED)
        self._user = _Splitter(vocab, user)
        self._all = _Splitter(vocab, [*user, *vocab.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)])

    @classmethod
    def from_gguf(cls, source: "str | Path | Any") -> "Tokenizer":
        """The tokenizer of a GGUF file, given by path or opened.

        Raises:
            ImpError: the file cannot be read, or has no usable tokenizer.
        """
        if isinstance(source, str | Path):
            from imp_runtime._core import Gguf

            source = Gguf.open(source)
        return cls(source.keys())

    @property
    def vocab_size(self) -> int:
        """Number of ids, padding included."""
        return len(self._vocab.pieces)

    @property
    def bos_id(self) -> int | None:
        """Begin-of-text id."""
        return self._vocab.bos_id

    @property
    def eos_id(self) -> int | None:
        """The file's main end id."""
        return self._vocab.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a generation."""
        return self._vocab.eos_ids

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`.

        Args:
            text: any text.
            add_special: put BOS and EOS around it, if the file asks for them.
            parse_special: control tokens written in the text become their ids; otherwise they are
                plain text. User-defined tokens always become their ids.

        Raises:
            ImpError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ImpError(f"the text has a lone surrogate at character {error.start}") from error
        vocab = self._vocab
        ids: list[int] = []
        if add_special and self.add_bos and vocab.bos_id is not None:
            ids.append(vocab.bos_id)
        splitter = self._all if parse_special else self._user
        for part in splitter.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encoder.encode(part))
        if add_special and self.add_eos and vocab.eos_id is not None:
            ids.append(vocab.eos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ImpError: an id is outside the vocabulary.
        """
        kept = [i for i in ids if not (skip_special and self.is_special(i))]
        data = b"".join(map(self.token_bytes, kept))
        if self._spm and self._encoder.add_space_prefix and data.startswith(b" "):  # type: ignore[attr-defined]
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id adds to the text; empty for padding ids.

        Raises:
            ImpError: the id is outside the vocabulary.
        """
        if not 0 <= token < len(self._bytes):
            raise ImpError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token]

    def piece(self, token: int) -> str:
        """token_bytes() as text, with U+FFFD for what is no UTF-8."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether an id is a control token, which is not part of the text."""
        return token in self._special

    def _all_bytes(self) -> list[bytes]:
        normal = spm.piece_bytes if self._spm else bpe.piece_bytes

        def one(piece: str, kind: TokenType) -> bytes:
            if kind == TokenType.NORMAL:
                return normal(piece)
            if kind == TokenType.BYTE:
                return bytes([spm.byte_value(piece)])
            return b"" if kind == TokenType.UNUSED else piece.encode()

        return list(map(one, self._vocab.pieces, self._vocab.types))


class _Splitter:
    """Cuts text at tokens that are matched as a whole."""

    def __init__(self, vocab: Vocab, ids: list[int]) -> None:
        self._ids = {vocab.pieces[i]: i for i in reversed(ids) if vocab.pieces[i]}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None

    def split(self, text: str) -> Iterable[str | int]:
        """Pieces of text and ids, in order; no empty text."""
        start = 0
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                if match.start() > start:
                    yield text[start : match.start()]
                yield self._ids[match.group()]
                start = match.end()
        if start < len(text):
            yield text[start:]
