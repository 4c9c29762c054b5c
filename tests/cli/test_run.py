"""`imp run` over a scripted session, and over the shipped model."""

import io
import re
import sys
from pathlib import Path

import pytest

from imp_runtime.cli import run as module
from imp_runtime.cli import run_stats
from imp_runtime.cli.main import main
from imp_runtime.llm import LLM
from imp_runtime.tokenizer import Tokenizer
from tests.text_fakes import KEYS, FakeModel, FakeSession

TOKENIZER = Tokenizer(KEYS)
SPEED = re.compile(
    r"speed: prompt (\d+) tokens, [\d.]+ t/s \(text: (.+)\); generated (\d+) tokens, "
    r"[\d.]+ t/s; end: (\w+); seed (\d+)\n"
)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, parse_special=True)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    """What `imp run` will use, whatever model it is given."""
    fake = FakeSession([])

    def load(path: Path, **options: object) -> LLM:
        fake.options = options
        return LLM.from_session(FakeModel(**getattr(fake, "keys", {})), fake)

    monkeypatch.setattr(module, "LLM", load)
    return fake


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["run", *args])
    out, err = capsys.readouterr()
    return status, out, err


def test_prompt(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.script = ids("a wörld<|im_end|>")
    status, out, err = run(capsys, "m.gguf", "-p", r"Hello\n", "--seed", "9", "--temp", "0")
    assert (status, out) == (0, "a wörld\n")
    assert session.fed[0] == ids("Hello\n")
    match = SPEED.fullmatch(err)
    assert match and match.groups() == (
        str(len(ids("Hello\n"))),
        "-p",
        str(len(ids("a wörld<|im_end|>"))),
        "eos",
        "9",
    )
    assert session.closed


def test_text_comes_as_it_is_made(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session.script = ids("one 日<|im_end|>")
    parts: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", parts.append)
    assert main(["run", "m.gguf", "-p", "x", "--temp", "0"]) == 0
    assert "".join(parts) == "one 日\n" and len(parts) >= 4 and "日" in parts


def test_cache_types(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.script = ids("a<|im_end|>")
    status, _, _ = run(capsys, "m.gguf", "-p", "x", "-ctk", "q8_0", "--cache-type-v", "bf16")
    assert status == 0
    assert (session.options["cache_type_k"], session.options["cache_type_v"]) == ("q8_0", "bf16")
    status, out, err = run(capsys, "m.gguf", "-p", "x", "-ctv", "q4_0")
    assert (status, out) == (1, "")
    assert "-ctv is 'q4_0', it must be f32, f16, bf16 or q8_0" in err


def test_batch_invariant(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.script = ids("a<|im_end|>")
    assert run(capsys, "m.gguf", "-p", "x", "--batch-invariant")[0] == 0
    assert session.options["batch_invariant"] is True


def test_options(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.script = ids("a b STOP c d")
    args = ("-m", "m.gguf", "-p", "x", "--temp", "0", "-c", "77", "-t", "3", "--device", "cpu")
    status, out, err = run(capsys, *args, "--stop", "STOP")
    assert (status, out.strip(), SPEED.fullmatch(err)[4]) == (0, "a b", "stop")
    assert session.options["n_ctx"] == 77 and session.options["n_threads"] == 3
    session.script = ids("a b c d")
    _, out, err = run(capsys, *args, "-n", "2")
    assert (out, SPEED.fullmatch(err)[4]) == ("a b\n", "length")
    session.script = [TOKENIZER.eos_id, *ids("b<|im_end|>")]
    _, _, err = run(capsys, *args, "-n", "3", "--ignore-eos")
    assert SPEED.fullmatch(err)[3] == "3"


def test_sampling_flags_reach_the_sampler(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    stream = LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda self, text, params: seen.append(params) or stream(self, text, params)
    )
    session.keys = {"general.sampling.top_k": 11, "general.sampling.temp": 0.5}
    session.script = ids("a") * 2
    flags = (
        "--top-p 0.5 --min-p 0.1 --repeat-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --repeat-last-n -1 -n 1"
    )
    run(capsys, "m.gguf", "-p", "x", *flags.split())
    run(capsys, "m.gguf", "-p", "x", "--top-k", "3", "--temperature", "0.7", "-n", "1")
    first, second = seen
    assert (first.top_k, first.temperature, first.top_p, first.min_p) == (11, 0.5, 0.5, 0.1)
    assert (first.repetition_penalty, first.presence_penalty) == (1.1, 0.2)
    assert (first.frequency_penalty, first.penalty_last_n) == (0.3, -1)
    assert (second.top_k, second.temperature) == (3, 0.7)


def test_file(session: FakeSession, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(rb"keep\n" + b"\n")
    session.script = ids("x<|im_end|>")
    _, _, err = run(capsys, "m.gguf", "-f", str(file), "--temp", "0")
    assert session.fed[0] == ids("keep\\n\n")
    assert SPEED.fullmatch(err)[2] == str(file)


def test_chat_prompt(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.script = ids("Fine<|im_end|>")
    args = ("m.gguf", "-p", "How?", "--chat", "--system", "Be brief", "--temp", "0")
    assert run(capsys, *args)[1] == "Fine\n"
    assert session.fed[0] == ids(
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_interactive(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session.script = ids("Yes<|im_end|>No<|im_end|>")
    monkeypatch.setattr(sys, "stdin", io.StringIO("A?\n\nB?\n"))
    status, out, err = run(capsys, "m.gguf", "-i", "--temp", "0")
    assert (status, out) == (0, "Yes\nNo\n")
    assert len(SPEED.findall(err)) == 2
    second = [f for f in session.fed if len(f) > 1][1]
    assert second == ids("<|im_end|>\n<|im_start|>user\nB?<|im_end|>\n<|im_start|>assistant\n")


def test_interrupt(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.script = ids("one two three four")
    session.interrupt_at = 2
    status, out, err = run(capsys, "m.gguf", "-p", "x", "--temp", "0")
    assert (status, out) == (130, "one two\n")
    assert SPEED.fullmatch(err)[4] == "interrupted"
    assert session.closed and session.n_open == 0


def test_errors(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in (
        (("-p", "x"), "a model is needed"),
        (("m", "-p", "x", "-f", "y"), "-p and -f are two sources of prompts, one is needed"),
        (("m", "-p", "x", "--prompts", "y"), "-p and --prompts are two sources"),
        (("m", "-p", "x", "-p", "y", "-i"), "-i reads messages from stdin"),
        (("m", "-p", "x", "-p", ""), "the prompt has no tokens"),
        (("m", "--prompts", "/dev/null"), "/dev/null has no line with a prompt"),
        (("m", "-p", "x", "-i"), "-i reads messages from stdin"),
        (("m", "-p", "x", "--system", "y"), "--system needs a chat"),
        (("m", "-p", "x", "--top-p", "7"), "top_p is 7, outside [0, 1]"),
        (("m", "-p", "x", "--seed", "-2"), "seed is -2, outside"),
        (("m", "-p", ""), "the prompt has no tokens"),
        (("m", "-p", "word " * 1001), "the context holds 1000"),
    ):
        status, out, err = run(capsys, *args)
        assert (status, out) == (1, ""), args
        assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert run(capsys, "m", "-p", "x", "--bogus")[0] == 2
    assert run(capsys, "m", "-p", "x", "-n", "-2")[0] == 2
    assert run(capsys, "m", "-p", "x", "-np", "0")[0] == 2
    assert run(capsys, "m", "-p", "x", "--cache-dir", "d", "--cache-size", "0")[0] == 2
    assert session.fed == []


def test_no_template(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session.keys = {"tokenizer.chat_template": None}
    monkeypatch.setattr(sys, "stdin", io.StringIO("A?\n"))
    status, _, err = run(capsys, "m.gguf")
    assert status == 1 and "no tokenizer.chat_template" in err


def test_shipped_model(prose_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = (str(prose_gguf), "-p", "It was a", "-n", "12", "-s", "4", "-c", "256", "-t", "1")
    status, out, err = run(capsys, *args)
    assert status == 0 and len(out.split()) >= 3
    assert run(capsys, *args)[1] == out
    assert SPEED.search(err)[3] == "12"


def texts_of(out: str) -> list[str]:
    parts = re.split(r"^--- (\d+)\n", out, flags=re.M)
    assert parts[0] == "" and parts[1::2] == [str(i + 1) for i in range(len(parts) // 2)]
    return parts[2::2]


def test_rows(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    """One state for one prompt or a chat, as many as run together for several."""
    for args, rows in (
        (("-p", "x"), 1),
        (("-p", "x", "-np", "9"), 1),
        (("-p", "x", "-p", "y", "-p", "z"), 3),
        (("-p", "x", "-p", "y", "-p", "z", "--parallel", "2"), 2),
        (("-p", "x") * 9, 4),
    ):
        session.script = ids("a<|im_end|>" * 9)
        assert run(capsys, "m.gguf", *args, "--temp", "0")[0] == 0
        assert session.options["n_parallel"] == rows
        assert "prefix_cache" not in session.options


def test_several_prompts(
    session: FakeSession, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    session.script = ids("one<|im_end|>two\n<|im_end|>")
    status, out, err = run(capsys, "m.gguf", "-p", r"a\n", "-p", "b", "--temp", "0", "-s", "7")
    assert (status, out) == (0, "--- 1\none\n--- 2\ntwo\n")
    assert [f for f in session.fed if f in (ids("a\n"), ids("b"))] == [ids("a\n"), ids("b")]
    speed = r"speed: 2 prompts, \d+ tokens \(text: -p\); generated \d+ tokens; .* seeds 7 7\n"
    assert re.fullmatch(speed, err)
    session.script = ids("x<|im_end|>y<|im_end|>")
    session.fed.clear()
    file = tmp_path / "prompts"
    file.write_bytes(b"first\r\n\n" + rb"second\tone")
    status, out, err = run(capsys, "m.gguf", "--prompts", str(file), "--chat", "--temp", "0")
    assert (status, texts_of(out)) == (0, ["x\n", "y\n"]) and f"(text: {file})" in err
    chats = [f"<|im_start|>user\n{t}<|im_end|>\n" for t in ("first", "second\tone")]
    starts = [ids(c + "<|im_start|>assistant\n") for c in chats]
    assert [f for f in session.fed if len(f) > 1] == starts


STATS = re.compile(
    r"stats: prompt (\d+) tokens, [\d.]+ t/s, first token after [\d.]+ s; "
    r"decode (\d+) tokens, [\d.]+ t/s \([\d.]+ ms a token\)\n"
)


def test_stats(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("m.gguf", "-p", "x", "--temp", "0", "--stats")
    session.script = ids("a b c<|im_end|>")
    steps = len(session.script)
    status, out, err = run(capsys, *args)
    assert (status, out) == (0, "a b c\n")
    match = STATS.match(err)
    assert match and match.groups() == (str(len(ids("x"))), str(steps - 1))
    assert SPEED.fullmatch(err[match.end() :])  # no word of a cache
    session.fed, session.slots, session.script = [], 10, ids("a b c<|im_end|>")
    _, _, err = run(capsys, *args)
    experts = (
        f"stats: experts: hit rate 75.00%, {3 * steps} of {12 * steps} experts missed, "
        f"{3 * steps / 1000:.3f} GB over PCIe in {steps / 1000:.3f} s"
    )
    assert err.splitlines()[1] == experts
    session.script = ids("one<|im_end|>two<|im_end|>")
    _, out, err = run(capsys, "m.gguf", "-p", "a", "-p", "b", "--temp", "0", "--stats")
    assert out == "--- 1\none\n--- 2\ntwo\n"
    assert re.search(r"first tokens after [\d.]+ s \(median\), [\d.]+ s at most", err)


def test_stats_are_live_on_a_terminal(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is drawn below the text, taken away before more text comes, and gone at the end."""
    both: list[str] = []
    monkeypatch.setattr(run_stats, "REFRESH_SECONDS", 0.0)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "write", both.append)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    session.script = ids("a b c<|im_end|>")
    assert main(["run", "m.gguf", "-p", "x", "--temp", "0", "--stats"]) == 0
    both = both[next(i for i, part in enumerate(both) if part.startswith("a")) :]  # after loading
    shown = "".join(both)
    assert re.sub(r"\x1bD\x1bM\x1b7\x1bD\r\x1b\[K[^\x1b]*\x1b8|\x1b\[J", "", shown).startswith(
        "a b c\nstats: prompt"
    )
    drawn = False
    for part in both:
        if part.startswith("\x1bD"):
            drawn = True
            assert "prompt 1 tokens" in part and "t/s" in part
        elif part == "\x1b[J":
            drawn = False
        else:
            assert not drawn, part


def test_several_prompts_are_as_each_alone(
    prose_gguf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = ["It was a", "The ship", "At noon", "Nobody", "x", "The old house"]
    args = (str(prose_gguf), "-n", "12", "-s", "4", "-c", "256", "-t", "1")
    alone = [run(capsys, *args, "-p", p)[1] for p in prompts]
    file = tmp_path / "prompts"
    file.write_text("\n".join(prompts))
    for extra in ((), ("-np", "1"), ("-np", "6"), ("--cache-dir", str(tmp_path / "d"))):
        status, out, err = run(capsys, *args, "--prompts", str(file), *extra)
        assert status == 0 and texts_of(out) == alone and "generated 72 tokens" in err


def test_cache_dir(
    prose_gguf: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later run does not read what an earlier one has read; damaged states are told."""
    folder = tmp_path / "states"
    args = (str(prose_gguf), "-n", "8", "-s", "4", "-c", "512", "-t", "1")
    prompt = ("-p", "The old house on the hill " * 6)
    cold = run(capsys, *args, *prompt)
    assert "from the cache" not in cold[2]
    args += ("--cache-dir", str(folder))
    first, second = (run(capsys, *args, *prompt) for _ in range(2))
    assert first[:2] == second[:2] == cold[:2] and "from the cache" not in first[2]
    match = re.search(r"prompt (\d+) tokens and (\d+) from the cache", second[2])
    read = int(re.search(r"prompt (\d+) tokens", cold[2])[1])
    assert match and int(match[1]) + int(match[2]) == read and int(match[2]) > int(match[1])
    other = run(capsys, *args, *prompt, "-ctk", "f16")
    states = len(list(folder.iterdir()))
    note = re.search(rf"note: {folder} also holds (\d+) states of other models or cache", other[2])
    assert note and 0 < int(note[1]) < states and "from the cache" not in other[2]
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    broken = run(capsys, *args, *prompt)
    assert broken[:2] == cold[:2] and re.search(r"note: .*imps: .*; it was removed\n", broken[2])
    # a chat by turns: the state of one is the beginning of the next
    talk = "Where are we?\nAnd now?\n"
    outs = []
    for extra in ((), ("--cache-dir", str(folder))):
        monkeypatch.setattr(sys, "stdin", io.StringIO(talk))
        outs.append(run(capsys, *args[:-2], *extra, "-i", "--system", "You sail."))
    assert outs[0][:2] == outs[1][:2]
    assert len(re.findall(r"and \d+ from the cache", outs[1][2])) == 1
