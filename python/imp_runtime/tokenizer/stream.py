"""Token ids to text, one at a time."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from imp_runtime.tokenizer.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes ids as they come; never gives half a character.

    Bytes that may still become a character are held back; bytes that cannot become one turn into
    U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty.

        Raises:
            ImpError: the id is outside the vocabulary.
        """
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The end of the text: U+FFFD if bytes of an unfinished character were held back."""
        return self._decoder.decode(b"", final=True)
