"""SentencePiece rebuilt from keys, against the model that the keys were taken from."""

import io
from pathlib import Path

import pytest
import sentencepiece

from imp_runtime.errors import ImpError
from imp_runtime.tokenizer import Tokenizer
from imp_runtime.tokenizer.spm import byte_value

CORPUS = Path(__file__).parents[2] / "models" / "heldout_austen.txt"
TEXTS = [
    "Hello world",
    "x   y",
    " a  b ",
    "",
    "it is a truth<end> universally",
    "naïve 日本 😀",
    "x\ny\tz",
    "<s>",
]


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.read_text(encoding="utf-8").splitlines()[:1500]),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<end>", "\u2581\u2581\u2581"],
        control_symbols=["<turn>"],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def keys_of(model: sentencepiece.SentencePieceProcessor) -> dict:
    size = model.get_piece_size()
    user = {"<end>", "\u2581\u2581\u2581"}

    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.is_byte(i):
            return 6
        return 4 if model.id_to_piece(i) in user else 1

    pieces = [model.id_to_piece(i) for i in range(size)]
    # a GGUF file stores user-defined tokens with plain spaces
    pieces = [p.replace("\u2581", " ") if p in user else p for p in pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_same_ids_and_text(trained: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = Tokenizer(keys_of(trained))
    corpus = CORPUS.read_text(encoding="utf-8")[100_000:110_000]
    for text in [*TEXTS, corpus]:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == trained.encode(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("Hi") == [1, *trained.encode("Hi")]  # BOS unless the file says no


def test_special_tokens(trained: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = Tokenizer(keys_of(trained))
    turn, end = trained.piece_to_id("<turn>"), trained.piece_to_id("<end>")
    ids = tokenizer.encode("a<turn>b<end>", add_special=False, parse_special=True)
    assert ids == [*trained.encode("a"), turn, *trained.encode("b<end>")] and ids[-1] == end
    assert turn not in tokenizer.encode("a<turn>b")
    assert tokenizer.eos_ids == {2}


def test_no_space_in_front(trained: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = Tokenizer(keys_of(trained) | {"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("a truth", add_special=False)
    assert ids != trained.encode("a truth")
    assert tokenizer.decode(ids) == "a truth"
    assert tokenizer.decode(tokenizer.encode(" a", add_special=False)) == " a"


def test_unknown_token_of_another_type(trained: sentencepiece.SentencePieceProcessor) -> None:
    keys = keys_of(trained)
    keys["tokenizer.ggml.token_type"] = [3, *keys["tokenizer.ggml.token_type"][1:]]
    assert Tokenizer(keys).encode("Hi", add_special=False) == trained.encode("Hi")


def test_more_than_one_unknown(trained: sentencepiece.SentencePieceProcessor) -> None:
    keys = keys_of(trained)
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "<pad-a>"]
    keys["tokenizer.ggml.scores"] = [*keys["tokenizer.ggml.scores"], 0.0]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 2]
    assert Tokenizer(keys).encode("Hi", add_special=False) == trained.encode("Hi")


def test_byte_tokens_are_checked() -> None:
    assert byte_value("<0x0A>") == 10
    for bad in ("<0x0>", "0x0A", "<0xZZ>"):
        with pytest.raises(ImpError, match="not written <0x00>"):
            byte_value(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": [1.0]}, "scores has 1 entries for 700 tokens"),
        ({"tokenizer.ggml.scores": None}, "no tokenizer.ggml.scores"),
        (
            {"tokenizer.ggml.token_type": [1] * 700, "tokenizer.ggml.unknown_token_id": None},
            "no token has the type UNKNOWN",
        ),
        ({"tokenizer.ggml.token_type": [2] + [6] * 699}, "byte piece"),
        ({"tokenizer.ggml.tokens": ["a"] * 700}, "SentencePiece vocabulary cannot be used"),
    ],
)
def test_damaged_keys(
    trained: sentencepiece.SentencePieceProcessor, change: dict, message: str
) -> None:
    keys = {k: v for k, v in (keys_of(trained) | change).items() if v is not None}
    with pytest.raises(ImpError, match=message):
        Tokenizer(keys)
