"""The tools on the shipped model, against the stored float32 results of transformers."""

import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from imp_runtime.cli import diff as diff_cli
from imp_runtime.cli import perplexity as cli
from imp_runtime.convert import ConvertOptions, convert
from imp_runtime.eval import PerplexityOptions, perplexity
from imp_runtime.eval.tasks import common_prefix, ending_task, run_tasks, sequences_needed
from imp_runtime.model import Model
from imp_runtime.session import Session
from imp_runtime.tokenizer import Tokenizer

GOLDEN = np.load(Path(__file__).parents[1] / "models" / "golden" / "prose.npz")
TOKENS = GOLDEN["tokens"].astype(np.int32)  # four windows of 512
# Running perplexity after each window, of exp(mean nll of positions 256 to 510), in transformers.
WINDOWS = (27.930584, 25.026953, 29.578092, 30.078161)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def gguf(prose_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its n-gram table rounded to BF16, as in the reference."""
    out = tmp_path_factory.mktemp("prose") / "prose.gguf"
    convert(prose_checkpoint, out, ConvertOptions(ngram="bf16"))
    return out


@pytest.fixture(scope="module")
def text(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that the tokenizer turns into TOKENS."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    tokenizer = Tokenizer.from_gguf(gguf)
    path.write_bytes((tokenizer.decode(TOKENS.tolist()) + "\n").encode())
    assert tokenizer.encode(path.read_text()[:-1]) == TOKENS.tolist()
    return str(path)


def test_perplexity_of_windows(gguf: Path) -> None:
    with Model.load(gguf) as model, Session(model, n_ctx=512) as session:
        result = perplexity(session, TOKENS, PerplexityOptions(n_ctx=512))
        one = perplexity(session, TOKENS, PerplexityOptions(n_ctx=512, chunks=1))
        again = perplexity(session, TOKENS, PerplexityOptions(n_ctx=512, chunks=1))
        pieces = perplexity(session, TOKENS, PerplexityOptions(n_ctx=512, n_batch=200, chunks=1))
    assert [window.ppl for window in result.windows] == pytest.approx(WINDOWS, rel=TOLERANCE)
    expected = -GOLDEN["logprob_windows"][:, 256:].ravel()
    np.testing.assert_allclose(result.nll, expected, atol=1e-4)
    np.testing.assert_array_equal(one.nll, result.nll[:255])
    np.testing.assert_array_equal(one.nll, again.nll)
    assert one.logits_sha256 == again.logits_sha256
    np.testing.assert_allclose(pieces.nll, one.nll, atol=1e-4)


def test_command_line(gguf: Path, text: str, tmp_path: Path, capfd) -> None:
    base = str(tmp_path / "base.kld")
    flags = ["-m", str(gguf), "-c", "512", "-ub", "256", "-t", "2"]
    assert cli.main([*flags, "-f", text, "--chunks", "3", "--kl-divergence-base", base]) == 0
    out, err = capfd.readouterr()
    steps = [float(value) for value in re.findall(r"\[\d+\]([0-9.]+),", out)]
    assert steps == pytest.approx(WINDOWS[:3], rel=TOLERANCE)
    assert "system_info: cpu" in err and "2 threads" in err
    assert cli.main([*flags, "-f", text, "-c", "1025"]) == 1
    assert (
        "the text has 2048 tokens, a context of 1025 needs at least 2050" in capfd.readouterr()[1]
    )
    assert cli.main([*flags, "--kl-divergence", "--kl-divergence-base", base]) == 0
    out, _ = capfd.readouterr()
    assert re.search(r"^Mean    KLD: +-?0\.00000\d ", out, re.M)
    assert "Same top p: 100.000 ± 0.000 %" in out
    found = re.search(r"Mean PPL\(Q\) +: +([0-9.]+)", out)
    assert found and float(found[1]) == pytest.approx(steps[-1], abs=1e-4)
    types = ["-ctk", "q8_0", "-ctv", "f16"]
    assert cli.main([*flags, *types, "--kl-divergence", "--kl-divergence-base", base]) == 0
    out, err = capfd.readouterr()
    assert "kv cache q8_0 f16" in err
    mean = re.search(r"^Mean    KLD: +([0-9.]+) ", out, re.M)
    assert mean and 1e-6 < float(mean[1]) < 2e-4


def test_windows_share_steps(gguf: Path, text: str, tmp_path: Path, capfd) -> None:
    """Four windows of 128 tokens in a step of 512 print what one at a time prints."""
    flags = ["-m", str(gguf), "-f", text, "-c", "128", "--chunks", "6", "-t", "2"]
    outs, files = [], []
    for i, extra in enumerate((["-np", "1"], ["-b", "128"], ["-np", "3"], [])):
        files.append(tmp_path / str(i))
        assert cli.main([*flags, *extra, "--kl-divergence-base", str(files[-1])]) == 0
        out, err = capfd.readouterr()
        outs.append((out, re.search(r"Final estimate.*", err)[0], re.search(r"sha256.*", err)[0]))
        assert f"n_seq={(1, 1, 3, 16)[i]}\n" in err
        compare = ["-m", str(gguf), *extra, "--kl-divergence", "--kl-divergence-base"]
        assert cli.main([*compare, str(files[0])]) == 0
        outs[-1] += (capfd.readouterr()[0],)
    assert outs == outs[:1] * 4
    assert len({f.read_bytes() for f in files}) == 1


def test_task_scores_are_those_of_whole_texts(gguf: Path) -> None:
    """Shared beginnings and shared steps change nothing."""
    text = TOKENS.tolist()
    tasks = [
        ending_task(
            f"task {i}",
            [text[40 * i : 40 * i + 25] + text[at : at + 4 + i] for at in (40 * i + 25, 900, 1700)],
            frozenset([0]),
        )
        for i in range(6)
    ]
    with (
        Model.load(gguf) as model,
        Session(model, n_ctx=64, max_seqs=sequences_needed(16), n_ubatch=48) as session,
    ):
        results = list(run_tasks(session, tasks))
        for task, result in zip(tasks, results, strict=True):
            first = common_prefix(task.sequences)
            for tokens, score in zip(task.sequences, result.scores, strict=True):
                with session.open() as sequence:
                    nll = sequence.score(tokens)
                assert score == pytest.approx(-nll[first - 1 :].mean(), rel=1e-14)  # sum's order
    assert results[-1].n_right >= 4  # the text's own continuation


def test_diff_of_a_model_and_its_stored_run(gguf: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    diff_cli.register(app)
    app.command("other")(lambda: None)
    stored = str(tmp_path / "run.npz")
    ids = ",".join(map(str, TOKENS[:40]))
    run = CliRunner().invoke(app, ["diff", str(gguf), "--tokens", ids, "--save", stored])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(app, ["diff", str(gguf), stored])
    assert run.exit_code == 0, run.output
    rows = [line.split()[0] for line in run.stdout.splitlines() if line.startswith("blk.")]
    assert rows[:3] == ["blk.0.attn_out", "blk.0.ffn_out", "blk.0.residual"]
    assert "blk.1.ngram_out" in rows and rows[-1] == "blk.7.residual"
    assert run.stdout.splitlines()[-1].startswith("equal: ")
    other = CliRunner().invoke(app, ["diff", str(gguf), stored, "--tokens", ids + ",1"])
    assert other.exit_code == 2
