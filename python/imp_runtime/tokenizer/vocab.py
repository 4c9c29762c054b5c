"""The vocabulary of a GGUF file: pieces, their types and the special ids, checked once."""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from imp_runtime.errors import ImpError

_PREFIX = "tokenizer.ggml."
# Control tokens with these names end a generation, whatever the file's eos_token_id is.
_END_NAMES = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TYPES = {t.value: t for t in TokenType}


class Vocab:
    """Pieces and special ids.

    Attributes:
        pieces: the text of each id as the file stores it.
        types: TokenType of each id.
        bos_id: begin-of-text id, or None.
        eos_ids: every id that ends a generation.
    """

    def __init__(self, keys: Mapping[str, Any]) -> None:
        """Read and check the keys.

        Raises:
            ImpError: a key is missing, has the wrong length or names an id that does not exist.
        """
        self._keys = keys
        self.pieces: list[str] = [_text(i, p) for i, p in enumerate(self.need("tokens"))]
        size = len(self.pieces)
        if size == 0:
            raise ImpError("tokenizer.ggml.tokens is empty")
        types = self.get("token_type")
        if types is not None and len(types) != size:
            raise ImpError(f"tokenizer.ggml.token_type has {len(types)} entries for {size} tokens")
        self.types = (
            [_type(i, t) for i, t in enumerate(types)]
            if types is not None
            else ([TokenType.NORMAL] * size)
        )
        self.bos_id = self._special("bos_token_id")
        self.eos_id = self._special("eos_token_id")
        self.unk_id = self._special("unknown_token_id")
        self.eos_ids = self._end_ids()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of tokenizer.ggml.`name`."""
        return self._keys.get(_PREFIX + name, default)

    def need(self, name: str) -> Any:
        """As get(), but an absent key is an error."""
        value = self.get(name)
        if value is None:
            raise ImpError(f"the file has no {_PREFIX}{name}")
        return value

    def ids_of(self, *types: TokenType) -> list[int]:
        """Ids of the given types, rising."""
        wanted = set(types)
        return [i for i, t in enumerate(self.types) if t in wanted]

    def _special(self, name: str) -> int | None:
        value = self.get(name)
        return None if value is None else self._check(name, value)

    def _check(self, name: str, value: Any) -> int:
        if not 0 <= int(value) < len(self.pieces):
            raise ImpError(f"{_PREFIX}{name} is {value}, but there are {len(self.pieces)} tokens")
        return int(value)

    def _end_ids(self) -> frozenset[int]:
        ids = {self._special(f"{n}_token_id") for n in ("eos", "eot", "eom")} - {None}
        listed: Iterable[Any] = self._keys.get("imp.eos_token_ids", ())
        ids.update(self._check("eos_token_ids", i) for i in listed)
        control = self.ids_of(TokenType.CONTROL)
        ids.update(i for i in control if self.pieces[i] in _END_NAMES)
        return frozenset(i for i in ids if i is not None)


def _text(token: int, piece: str) -> str:
    try:
        piece.encode()
    except UnicodeEncodeError as error:
        raise ImpError(f"tokenizer.ggml.tokens[{token}] is not UTF-8") from error
    return piece


def _type(token: int, value: Any) -> TokenType:
    kind = _TYPES.get(int(value))
    if kind is None:
        raise ImpError(f"tokenizer.ggml.token_type of token {token} is {value}, not 1 to 6")
    return kind
