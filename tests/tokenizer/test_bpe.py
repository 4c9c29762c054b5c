"""Byte-level BPE against stored ids of llama.cpp, and against the model's own tokenizer.json."""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from imp_runtime.errors import ImpError
from imp_runtime.tokenizer import StreamDecoder, Tokenizer
from tests.tokenizer.prose_keys import keys_of

MODEL = Path(__file__).parents[2] / "models" / "prose-nvfp4"
# Ids that llama.cpp's llama-tokenize gives for this vocabulary, with and without control tokens
# recognised; the last text is decomposed, its ids are those of the composed form.
GOLDEN = json.loads((Path(__file__).parent / "golden_prose.json").read_text(encoding="utf-8"))
KEYS = keys_of(MODEL)
TEXT = st.text(
    st.one_of(
        st.sampled_from("aeiou THE'sdmt \n\r\t.,!?0123456789"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(KEYS)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.from_file(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: ascii(c["text"][:20]))
def test_golden(tokenizer: Tokenizer, case: dict) -> None:
    assert tokenizer.encode(case["text"], parse_special=True) == case["ids"]
    assert tokenizer.encode(case["text"]) == case["plain"]
    composed = unicodedata.normalize("NFC", case["text"])
    assert tokenizer.decode(case["ids"]) == composed
    assert tokenizer.decode(case["plain"]) == composed


@pytest.mark.parametrize("name", ["heldout_austen.txt", "heldout_tech.txt"])
def test_long_text(tokenizer: Tokenizer, reference: Reference, name: str) -> None:
    text = (MODEL.parent / name).read_bytes().decode("utf-8")
    assert tokenizer.encode(text) == reference.encode(text).ids


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_any_text(text: str) -> None:
    tokenizer, reference = _pair()
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    composed = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(ids) == composed
    stream = StreamDecoder(tokenizer, skip_special=False)
    assert "".join([*map(stream.push, ids), stream.flush()]) == composed


_CACHE: list = []


def _pair() -> tuple[Tokenizer, Reference]:
    if not _CACHE:
        _CACHE.extend((Tokenizer(KEYS), Reference.from_file(str(MODEL / "tokenizer.json"))))
    return _CACHE[0], _CACHE[1]


def test_special_ids(tokenizer: Tokenizer) -> None:
    end, start, stop = (
        tokenizer.encode(f"<|{n}|>", parse_special=True)
        for n in ("endoftext", "im_start", "im_end")
    )
    assert (tokenizer.bos_id, tokenizer.eos_id) == (end[0], stop[0])
    assert tokenizer.eos_ids == {end[0], stop[0]}  # the file's own, and the one known by name
    assert tokenizer.is_special(start[0])
    think = tokenizer.encode("<think>")
    assert len(think) == 1 and not tokenizer.is_special(think[0])  # user-defined: always whole
    assert tokenizer.decode([*start, *think, *stop], skip_special=True) == "<think>"


def test_longest_special_token_wins() -> None:
    tokens, types = list(KEYS["tokenizer.ggml.tokens"]), list(KEYS["tokenizer.ggml.token_type"])
    tokens[-3:], types[-3:] = ["<x>", "<x>y", "b<x>"], [4, 4, 4]
    size = len(tokens)
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = Tokenizer(KEYS | changed)
    a = tokenizer.encode("a")
    assert tokenizer.encode("a<x>ya<x>") == [*a, size - 2, *a, size - 3]
    assert tokenizer.encode("ab<x>y") == [*a, size - 1, *tokenizer.encode("y")]  # leftmost first


def test_end_ids_listed_by_the_file() -> None:
    keys = KEYS | {"imp.eos_token_ids": [5, 7], "tokenizer.ggml.eot_token_id": 9}
    assert Tokenizer(keys).eos_ids >= {5, 7, 9}


def test_padding_is_never_produced(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    ids = tokenizer.encode(f"[PAD{size - 1}]", parse_special=True)
    assert size - 1 not in ids and len(ids) > 1
    assert tokenizer.token_bytes(size - 1) == b""
    whole = Tokenizer(KEYS | {"tokenizer.ggml.pre": "llama-bpe"})  # takes whole words if it can
    assert size - 1 not in whole.encode(f"[PAD{size - 1}]")


def test_bos_and_eos() -> None:
    keys = KEYS | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    both = Tokenizer(keys)
    inner = both.encode("Hi", add_special=False)
    assert both.encode("Hi") == [both.bos_id, *inner, both.eos_id]
    without = {k: v for k, v in KEYS.items() if k != "tokenizer.ggml.add_bos_token"}
    assert not Tokenizer(without).add_bos
    assert Tokenizer(without | {"tokenizer.ggml.pre": "llama-bpe"}).add_bos  # by its name


def test_pieces_of_half_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日")
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "日"
    assert tokenizer.piece(ids[0]) == "\ufffd"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "no-such"}, "tokenizer.ggml.pre is 'no-such'"),
        ({"tokenizer.ggml.pre": None}, "no tokenizer.ggml.pre"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 entries for 4100 tokens"),
        ({"tokenizer.ggml.token_type": [7] * 4100}, "token_type of token 0 is 7"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"merges\[0\] is 'ab', not two pieces"),
        ({"tokenizer.ggml.merges": ["a b c"]}, r"merges\[0\] is 'a b c'"),
        ({"tokenizer.ggml.merges": ["a xqz"]}, r"merges\[0\] needs 'xqz'"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.eos_token_id": 4100}, "eos_token_id is 4100, but there are 4100 tokens"),
        ({"tokenizer.ggml.tokens": ["\udcff"] + ["a"] * 4099}, r"tokens\[0\] is not UTF-8"),
        ({"tokenizer.ggml.tokens": ["a"] * 4100}, "tokens 0 and 4085 are the same piece"),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "add_bos_token is set, but there is no bos_token_id",
        ),
    ],
)
def test_damaged_keys(change: dict, message: str) -> None:
    keys = {k: v for k, v in (KEYS | change).items() if v is not None}
    with pytest.raises(ImpError, match=message):
        Tokenizer(keys)


def test_ids_and_text_out_of_range(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ImpError, match=f"{bad} is outside the vocabulary of 4100"):
            tokenizer.decode([bad])
    with pytest.raises(ImpError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_from_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "vocab.gguf"
    writer = GGUFWriter(path, "qwen4exp")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(KEYS["tokenizer.ggml.tokens"])
    writer.add_token_types(KEYS["tokenizer.ggml.token_type"])
    writer.add_token_merges(KEYS["tokenizer.ggml.merges"])
    writer.add_eos_token_id(KEYS["tokenizer.ggml.eos_token_id"])
    writer.add_array("imp.eos_token_ids", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = Tokenizer.from_gguf(path)
    assert read.encode("Hello, world") == tokenizer.encode("Hello, world")
    assert read.bos_id is None and read.eos_ids >= {1, 2}
