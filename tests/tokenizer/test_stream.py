"""Streaming decode: whole characters only, U+FFFD only when it is certain."""

from imp_runtime.tokenizer import StreamDecoder


class Bytes:
    """A tokenizer whose token ids are bytes; 256 is a control token."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<end>"

    def is_special(self, token: int) -> bool:
        return token == 256


def push(data: bytes) -> list[str]:
    decoder = StreamDecoder(Bytes())
    return [*map(decoder.push, data), decoder.flush()]


def test_character_comes_with_its_last_byte() -> None:
    assert push("aé日😀".encode()) == ["a", "", "é", "", "", "日", "", "", "", "😀", ""]


def test_invalid_bytes() -> None:
    assert push(b"\xff" + b"a") == ["\ufffd", "a", ""]
    assert push(b"\xe6\x97a") == ["", "", "\ufffda", ""]  # certain when the next byte does not fit
    assert push(b"\xc0\x80") == ["\ufffd", "\ufffd", ""]  # overlong
    assert push(b"\xed\xa0\x80")[0] == "" and "".join(push(b"\xed\xa0\x80")) == "\ufffd" * 3


def test_unfinished_at_the_end() -> None:
    assert push(b"a\xf0\x9f\x98") == ["a", "", "", "", "\ufffd"]


def test_as_decoding_at_once() -> None:
    import random

    random.seed(5)
    for _ in range(300):
        data = bytes(random.choices(b"az\x80\xbf\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80\xff", k=20))
        assert "".join(push(data)) == data.decode("utf-8", "replace")


def test_special_tokens() -> None:
    assert StreamDecoder(Bytes()).push(256) == ""
    assert StreamDecoder(Bytes(), skip_special=False).push(256) == "<end>"
