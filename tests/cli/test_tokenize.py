"""`imp tokenize`: output, byte for byte, and errors."""

from pathlib import Path

import pytest

from imp_runtime.cli.main import main
from imp_runtime.cli.text import unescape
from imp_runtime.errors import ImpError
from tests.text_fakes import KEYS


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> str:
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("vocab") / "vocab.gguf"
    writer = GGUFWriter(path, "qwen4exp")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(KEYS["tokenizer.ggml.tokens"])
    writer.add_token_types(KEYS["tokenizer.ggml.token_type"])
    writer.add_token_merges(KEYS["tokenizer.ggml.merges"])
    writer.add_bos_token_id(KEYS["tokenizer.ggml.bos_token_id"])
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def run(capfdbinary: pytest.CaptureFixture[bytes], *args: str) -> tuple[int, bytes, str]:
    status = main(["tokenize", *args])
    out, err = capfdbinary.readouterr()
    return status, out, err.decode()


def test_rows(vocab: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    status, out, err = run(capfdbinary, "-m", vocab, "-p", "Hello <|im_end|> 日")
    assert (status, err) == (0, "")
    assert out == (
        b"  4086 -> '<|endoftext|>'\n    39 -> 'H'\n   685 -> 'ell'\n    78 -> 'o'\n"
        b"   220 -> ' '\n  4088 -> '<|im_end|>'\n   220 -> ' '\n   162 -> '\xe6'\n"
        b"   245 -> '\x97'\n    98 -> '\xa5'\n"
    )


def test_ids_and_count(vocab: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    args = (vocab, "-p", "Hi<|im_end|>", "--ids")
    assert run(capfdbinary, *args)[1] == b"[4086, 39, 72, 4088]\n"
    assert run(capfdbinary, *args, "--no-bos")[1] == b"[39, 72, 4088]\n"
    assert run(capfdbinary, *args, "--no-bos", "--show-count")[1] == (
        b"[39, 72, 4088]\nTotal number of tokens: 3\n"
    )
    plain = run(capfdbinary, *args, "--no-bos", "--no-parse-special")[1]
    assert plain.startswith(b"[39, 72, 27, 91,") and b"4088" not in plain


def test_sources(
    vocab: str,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import io
    import sys

    file = tmp_path / "text.txt"
    file.write_bytes(b"ab\n")
    args = (vocab, "--ids", "--no-bos", "-f", str(file))
    from_file = run(capfdbinary, *args)[1]
    assert from_file == run(capfdbinary, vocab, "--ids", "--no-bos", "-p", "ab\n")[1]
    assert run(capfdbinary, *args, "-p", "other")[1] == from_file
    stdin = io.TextIOWrapper(io.BytesIO(b"other"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(capfdbinary, *args, "--stdin")[1] != from_file


def test_escapes(vocab: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    args = (vocab, "--ids", "--no-bos", "-p")
    assert run(capfdbinary, *args, r"a\nb")[1] == run(capfdbinary, *args, "a\nb")[1]
    assert run(capfdbinary, *args, r"a\nb", "--no-escape")[1] != run(capfdbinary, *args, "a\nb")[1]
    assert unescape(r"\t\\n\x41\q\xg\'\"") == "\t\\nA\\q\\xg'\""
    assert unescape(r"\xe6\x97\xa5") == "日"
    with pytest.raises(ImpError, match="not UTF-8 at byte 0"):
        unescape(r"\xff")


def test_errors(vocab: str, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"ok\xff")
    for args, message in (
        ((), "a model is needed"),
        ((vocab, "-m", vocab, "-p", "x"), "two models are given"),
        ((vocab,), "must specify one of: --stdin, --file or --prompt"),
        ((vocab, "-f", str(bad)), "bad.txt is not UTF-8 at byte 2 of 3"),
        ((vocab, "-f", str(tmp_path / "none")), "none: No such file"),
        ((str(bad), "-p", "x"), "bad.txt"),
        ((str(tmp_path / "none"), "-p", "x"), "none"),
    ):
        status, out, err = run(capfdbinary, *args)
        assert (status, out) == (1, b""), args
        assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_unknown_flag(vocab: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    status, out, err = run(capfdbinary, vocab, "-p", "x", "--no-such-flag")
    assert status == 2 and out == b"" and "--no-such-flag" in err
