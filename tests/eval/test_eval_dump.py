"""The file of --dump, and which positions --score-from scores."""

import re
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.eval import EvalError, PerplexityOptions, perplexity
from tests.eval import bigram

TABLE = bigram.table(33, 0)
TEXT = np.array(bigram.encode(bigram.WORDS), np.int32)


def session() -> bigram.Session:
    return bigram.Session(bigram.Model(TABLE))


def reference(index: np.ndarray, previous: np.ndarray) -> dict[str, np.ndarray]:
    """In float64, from the table alone."""
    rows = TABLE[previous].astype(np.float64)
    nll = np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1)) + rows.max(1)
    each = np.arange(len(index))
    own = rows[each, TEXT[index]]
    top = rows.argmax(1)
    return {
        "token": TEXT[index],
        "nll": nll - own,
        "rank": (rows > own[:, None]).sum(1),
        "top": top,
        "top_nll": nll - rows.max(1),
    }


@pytest.mark.parametrize(
    ("options", "step", "first"),
    [
        ({"n_ctx": 16}, 16, 8),
        ({"n_ctx": 16, "score_from": 0, "n_threads": 3}, 16, 0),
        ({"n_ctx": 21, "score_from": 19, "n_batch": 5, "chunks": 2}, 21, 19),
        ({"n_ctx": 9, "score_from": 7, "bos_id": 1}, 9, 7),
        ({"n_ctx": 9, "score_from": 0, "bos_id": 1}, 9, 0),
    ],
)
def test_every_scored_position(options: dict, step: int, first: int, tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    result = perplexity(session(), TEXT, PerplexityOptions(**options, dump=path))
    assert [file.name for file in tmp_path.iterdir()] == ["scores.npz"]
    stored = np.load(path)
    n_chunks = len(TEXT) // step if "chunks" not in options else 2
    position = np.tile(np.arange(first, step - 1), n_chunks)
    window = np.repeat(np.arange(n_chunks), step - 1 - first)
    index = window * step + position + 1
    np.testing.assert_array_equal(stored["window"], window)
    np.testing.assert_array_equal(stored["position"], position)
    np.testing.assert_array_equal(stored["index"], index)
    np.testing.assert_array_equal(stored["nll"], result.nll)
    previous = TEXT[index - 1].copy()
    if "bos_id" in options:
        previous[position == 0] = 1
    for name, values in reference(index, previous).items():
        np.testing.assert_allclose(stored[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(stored["tokens"], TEXT)
    assert (stored["n_ctx"], stored["step"], stored["first"]) == (step, step, first)
    assert result.ppl == pytest.approx(np.exp(stored["nll"].mean()))


def test_strided_windows(tmp_path: Path) -> None:
    text = np.tile(TEXT, 3)
    path = tmp_path / "scores.npz"
    perplexity(session(), text, PerplexityOptions(n_ctx=16, stride=64, dump=path))
    stored = np.load(path)
    np.testing.assert_array_equal(stored["token"], text[stored["index"]])
    np.testing.assert_array_equal(stored["index"], np.arange(192, 192 + len(stored["index"])))
    assert (stored["n_ctx"], stored["step"], stored["first"]) == (256, 64, 191)


@pytest.mark.parametrize("score_from", [-1, 15, 2**31 - 1])
def test_positions_outside_the_window(score_from: int) -> None:
    with pytest.raises(EvalError, match=f"--score-from is {score_from}, it must be 0 to 14 in 16"):
        perplexity(session(), TEXT, PerplexityOptions(n_ctx=16, score_from=score_from))
    perplexity(session(), TEXT, PerplexityOptions(n_ctx=16, score_from=14))


def test_a_failed_run_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    path.write_text("old")
    run = session()
    run.model.logits = TABLE.copy()
    run.model.logits[bigram.encode("z")[0]] = np.nan
    with pytest.raises(EvalError, match="not finite"):
        perplexity(run, TEXT, PerplexityOptions(n_ctx=16, dump=path))
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_nothing_is_evaluated_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    run = session()
    with pytest.raises(FileNotFoundError):
        perplexity(run, TEXT, PerplexityOptions(n_ctx=16, dump=tmp_path / "absent" / "scores.npz"))
    assert not run.calls


def test_the_example_of_the_documentation(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (repository / "docs" / "measuring.md").read_text("utf-8"), re.S
    )
    monkeypatch.chdir(tmp_path)
    for variant, name in enumerate(("a.npz", "b.npz")):
        run = bigram.Session(bigram.Model(bigram.table(33, variant)))
        perplexity(run, TEXT, PerplexityOptions(n_ctx=16, dump=Path(name)))
    exec(compile(code, "example", "exec"), {"__name__": "example"})
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) == 10 and re.fullmatch(r"same top token: \d+\.\d\d%", last)
