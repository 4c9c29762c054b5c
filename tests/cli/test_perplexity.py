"""imp-perplexity's output and errors; golden lines come from llama-perplexity itself."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from imp_runtime.cli import perplexity as cli
from imp_runtime.cli import perplexity_lines as lines
from imp_runtime.eval.windows import plan_windows
from tests.eval import bigram

EVAL = Path(__file__).parents[1] / "eval"
GOLDEN = json.loads((EVAL / "data" / "llama_perplexity.json").read_text())
NUMBER = re.compile(r"-?\d+\.\d+|-?\d+")


class Tokenizer:
    bos_id = 1

    def __init__(self, add_bos: bool) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [1] * (self.add_bos and add_special) + bigram.encode(text)


@pytest.fixture
def use_model(monkeypatch: pytest.MonkeyPatch):
    """Make the command line find a bigram model."""

    def use(n_vocab: int = 33, variant: int = 0, add_bos: bool = False) -> bigram.Session:
        session = bigram.Session(bigram.Model(bigram.table(n_vocab, variant)))

        @contextmanager
        def open_session(*_: object) -> Iterator[bigram.Session]:
            yield session

        monkeypatch.setattr(cli, "open_session", open_session)
        monkeypatch.setattr(cli, "load_tokenizer", lambda _: Tokenizer(add_bos))
        return session

    return use


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(bigram.WORDS + "\n")
    return str(path)


def assert_same_lines(ours: str, theirs: str) -> None:
    """Equal text; numbers equal to float32 accuracy or to one unit of their last digit."""
    assert NUMBER.sub("#", ours) == NUMBER.sub("#", theirs)
    for mine, golden in zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=True):
        last_digit = 10.0 ** -len(golden.partition(".")[2]) if "." in golden else 0
        assert float(mine) == pytest.approx(float(golden), rel=3e-7, abs=1.01 * last_digit)


@pytest.mark.parametrize("name", GOLDEN)
def test_prints_what_llama_perplexity_prints(name: str, use_model, tmp_path: Path, capfd) -> None:
    case = GOLDEN[name]
    use_model(case["n_vocab"], case["variant"], case["add_bos"])
    stored = EVAL / "data" / f"{case['n_vocab']}.kld"
    base = stored if "kld" in name else tmp_path / "base.kld"
    arguments = case["arguments"].format(base=base).split()
    if case["repeats"]:
        (tmp_path / "text").write_text(bigram.WORDS * case["repeats"])
        arguments += ["-f", str(tmp_path / "text")]
    assert cli.main(["-m", "model.gguf", *arguments]) == 0
    out, err = capfd.readouterr()
    assert_same_lines(out.rstrip("\n"), case["stdout"].rstrip("\n"))
    if case["final"]:
        final = re.search("Final estimate.*", err)
        assert final
        assert_same_lines(final[0], case["final"])
    if name.startswith("base"):
        assert base.stat().st_size == stored.stat().st_size


def test_log_scrapers_find_their_numbers(use_model, text: str, capfd) -> None:
    use_model()
    assert cli.main(["-m", "m", "-f", text, "-c", "16", "-ngl", "99", "-fa", "on"]) == 0
    out, err = capfd.readouterr()
    found = re.search(r"Final estimate: PPL = ([0-9.]+) \+/- ([0-9.]+)", err)
    assert found and float(found[1]) == pytest.approx(6740.1273, abs=1e-3)
    steps = re.findall(r"\[(\d+)\]([0-9.]+),", out)
    assert [int(step) for step, _ in steps] == list(range(1, 18))
    assert float(steps[-1][1]) == float(found[1])
    assert re.search(
        r"perplexity: calculating perplexity over 17 chunks, n_ctx=16, batch_size=2048, n_seq=128\n"
        r"perplexity: \d+\.\d\d seconds per pass - ETA \d+\.\d\d minutes\n",
        err,
    )
    assert re.search(r"perplexity: 272 tokens in [\d.]+ s, [\d.]+ tokens/s\n", err)
    assert re.search(r"sha256 of the last logits = [0-9a-f]{16}\n", err)
    assert "note: -ngl has no effect here: " in err and "note: -fa has no effect here: " in err


def test_a_strided_run_works_with_the_default_batch(use_model, tmp_path: Path, capfd) -> None:
    use_model(add_bos=True)
    (tmp_path / "text").write_text(bigram.WORDS * 3)
    arguments = ["-m", "m", "-f", str(tmp_path / "text"), "-c", "16", "--ppl-stride", "64"]
    assert cli.main(arguments) == 0
    out, err = capfd.readouterr()
    assert_same_lines(out.strip(), GOLDEN["strided"]["stdout"].strip())
    assert "perplexity_v2: have 817 tokens. Calculation chunk = 256\n" in err
    final = re.search(r"Final estimate: PPL = ([0-9.]+)", err)
    assert final and final[1] == re.findall(r"\]([0-9.]+),", out)[-1]


def test_positions_from_one_on_and_their_file(use_model, text: str, tmp_path: Path, capfd) -> None:
    use_model()
    path = str(tmp_path / "scores.npz")
    flags = ["-m", "m", "-f", text, "-c", "16", "--score-from", "3", "--dump", path]
    assert cli.main(flags) == 0
    err = capfd.readouterr().err
    stored = np.load(path)
    assert len(stored["nll"]) == 17 * 12 and set(stored["position"]) == set(range(3, 15))
    ppl = f"{np.exp(stored['nll'].mean()):.4f}"
    assert re.search(
        rf"Final estimate: PPL = {ppl} \+/- [0-9.]+, positions from 3 of each window\n", err
    )
    assert f"perplexity: saving all scores to {path}\n" in err


def test_stored_run_compares_with_itself(use_model, text: str, tmp_path: Path, capfd) -> None:
    use_model()
    base = str(tmp_path / "base.kld")
    assert cli.main(["-m", "m", "-f", text, "-c", "16", "--save-all-logits", base]) == 0
    assert f"perplexity: saving all logits to {base}\n" in capfd.readouterr().err
    flags = ["-m", "m", "--kl-divergence", "--kl-divergence-base", base]
    assert cli.main(flags) == 0
    out, _ = capfd.readouterr()
    assert "Same top p: 100.000" in out and re.search(r"Mean    KLD: +-?0\.0000", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-flag"], "invalid argument: --no-such-flag"),
        (["-f", "x"], "--model is required"),
        (["-m", "m"], "one text is needed (-f, -bf or -p), nothing is given"),
        (["-m", "m", "-p", "a", "-f", "b"], "one text is needed (-f, -bf or -p), --prompt and"),
        (["-m", "m", "-f", "absent.txt"], "absent.txt: No such file or directory"),
        (
            ["-m", "m", "-p", "short text", "-c", "8"],
            "the text has 10 tokens, a context of 8 needs",
        ),
        (["-m", "m", "-p", "short text", "-c", "0"], "--ctx-size is 0, it must be 3 to"),
        (["-m", "m", "-p", "a", "-ub", "0"], "--ubatch-size is 0, it must be at least 1"),
        (["-m", "m", "-p", "a", "-ctk", "q4_0"], "-ctk is 'q4_0', it must be one of f32, f16,"),
        (["-m", "m", "-p", "a", "-ctv", "iq4_nl"], "-ctv is 'iq4_nl', it must be one of f32"),
        (["-m", "m", "-p", "a", "-b", "0"], "--batch-size is 0, it must be at least 1"),
        (["-m", "m", "-p", "a", "--rope-scale", "2"], "--rope-scale is not supported: it would"),
        (["-m", "m", "-p", "a", "--device", "tpu"], "--device is 'tpu', it must be one of auto"),
        (
            ["-m", "m", "-p", "short text", "-c", "4", "--score-from", "3"],
            "--score-from is 3, it must be 0 to 2 in 4 tokens",
        ),
        (
            ["-m", "m", "-p", "short text", "--score-from", "3", "--ppl-stride", "2"],
            "--score-from and --ppl-stride cannot be combined",
        ),
        (
            ["-m", "m", "-p", "short text", "--score-from", "3", "--save-all-logits", "x"],
            "--score-from and --kl-divergence-base cannot be combined",
        ),
        (
            ["-m", "m", "-p", "short text", "--dump", "x", "--save-all-logits", "x"],
            "--dump and --kl-divergence-base are both x",
        ),
        (
            ["-m", "m", "--kl-divergence", "--kl-divergence-base", "x", "--dump", "y"],
            "--kl-divergence and --dump cannot be combined",
        ),
        (
            ["-m", "m", "--kl-divergence", "--kl-divergence-base", "x", "--score-from", "1"],
            "--kl-divergence and --score-from cannot be combined",
        ),
        (["-m", "m", "--kl-divergence"], "--kl-divergence needs the stored run"),
        (["-m", "m", "--kl-divergence", "--kl-divergence-base", "absent"], "absent: No such file"),
    ],
)
def test_errors_exit_1_with_one_line(arguments: list[str], message: str, use_model, capfd) -> None:
    use_model()
    assert cli.main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and message in last


@pytest.mark.parametrize(
    ("base", "flags", "message"),
    [
        ("33.kld", ["-c", "15"], "computed with a context of 16, here it is 15"),
        ("34.kld", [], "a vocabulary of 34 entries, the model has 33"),
        ("llama_perplexity.json", [], "does not start with _logits_"),
    ],
)
def test_unusable_bases(base: str, flags: list[str], message: str, use_model, capfd) -> None:
    use_model()
    file = str(EVAL / "data" / base)
    assert cli.main(["-m", "m", "--kl-divergence", "--kl-divergence-base", file, *flags]) == 1
    out, err = capfd.readouterr()
    assert out == "" and message in err


def test_non_finite_logits_exit_1_and_leave_no_file(use_model, text, tmp_path, capfd) -> None:
    run = use_model()
    run.model.logits = run.model.logits.copy()
    run.model.logits[bigram.encode("z")[0]] = np.nan  # "lazy": token 37
    base = tmp_path / "base.kld"
    flags = ["-m", "m", "-f", text, "-c", "8", "-b", "8", "--kl-divergence-base", str(base)]
    assert cli.main(flags) == 1
    out, err = capfd.readouterr()
    assert re.fullmatch(r"(\[\d\][\d.]+,){4}", out)
    assert "error: chunk 5 of 34: the logits of position 5 are not finite" in err
    assert "Final estimate" not in err and not list(tmp_path.glob("base*"))


def test_texts_are_read_as_bytes(use_model, tmp_path: Path, capfd, monkeypatch) -> None:
    use_model()
    seen: list[str] = []

    def encode(self: Tokenizer, text: str, add_special: bool = True) -> list[int]:
        seen.append(text)
        return [3] * 99

    monkeypatch.setattr(Tokenizer, "encode", encode)
    path = tmp_path / "text"
    path.write_bytes(b"a\r\nb\\n\n\n")
    flags = ["-m", "m", "-c", "8", "--chunks", "1"]
    for extra in (["-f", str(path)], ["-bf", str(path)], ["-f", str(path), "-e"], ["-p", "x\n"]):
        assert cli.main([*flags, *extra]) == 0
    assert seen == ["a\r\nb\\n\n", "a\r\nb\\n\n\n", "a\r\nb\n\n", "x\n"]
    path.write_bytes(b"ab\xff")
    assert cli.main([*flags, "-f", str(path)]) == 1
    assert "is not UTF-8 at byte 2 of 3" in capfd.readouterr().err


def test_help_and_version(capfd) -> None:
    assert cli.main(["-h"]) == 0
    out, _ = capfd.readouterr()
    assert "-ub, --ubatch-size N" in out and "-ngl, --gpu-layers" in out


def test_imp_perplexity_is_also_a_subcommand(use_model, text: str, capfd) -> None:
    use_model()
    app = typer.Typer()
    cli.register(app)
    app.command("other")(lambda: None)
    run = CliRunner().invoke(app, ["perplexity", "-m", "m", "-f", text, "-c", "16", "-ub", "4"])
    assert run.exit_code == 0 and "[17]6740.1273," in run.stdout
    assert CliRunner().invoke(app, ["perplexity", "--nope"]).exit_code == 1
    assert CliRunner().invoke(app, ["perplexity", "-h"]).exit_code == 0


def test_lines_wait_for_the_first_pass() -> None:
    plan = plan_windows(1000, 100, 300, 7)
    events: list[object] = []
    passes = lines.Passes(plan, events.append)
    for index in range(7):
        passes.add(index, 0.5, lambda index=index: events.append(f"line {index}"))
        assert len(events) == (0 if index < 2 else index + 2)
    assert events[:2] == [1.5, "line 0"] and events[-1] == "line 6"
    assert lines.pass_time("p", 1.5, plan) == "p: 1.50 seconds per pass - ETA 0.05 minutes"
    assert lines.pass_time("p", 3700.0, plan).endswith("ETA 2 hours 23.88 minutes")
