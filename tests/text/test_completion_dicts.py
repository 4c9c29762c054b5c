"""Calls and results as llama-cpp-python has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from imp_runtime.completion_dicts import params_of
from imp_runtime.errors import ImpError
from imp_runtime.llm import LLM
from imp_runtime.sampling import SamplingParams
from tests.text.test_llm import ids, llm

CHAT = [{"role": "user", "content": "How?"}]
GREEDY = {"temperature": 0}


def test_completion() -> None:
    model = llm("Hi there<|im_end|>" * 3)
    model.model.path = "x.gguf"
    done = model("One", max_tokens=20, **GREEDY)
    assert isinstance(done, dict)
    assert set(done) == {"id", "object", "created", "model", "choices", "usage"}
    assert (done["object"], done["model"]) == ("text_completion", "x.gguf")
    assert done["id"].startswith("cmpl-") and done["created"] > 1.7e9
    assert done["choices"] == [
        {"text": "Hi there", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    prompt, made = len(ids("One")), len(ids("Hi there<|im_end|>"))
    assert done["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }
    echoed = model.create_completion("One", max_tokens=20, echo=True, **GREEDY)
    assert echoed["choices"][0]["text"] == "OneHi there"
    short = model.create_completion("One", max_tokens=1, **GREEDY)
    assert short["choices"][0]["finish_reason"] == "length"


def test_pieces_of_a_completion() -> None:
    model = llm("Hi there<|im_end|>")
    model.model.path = "x.gguf"
    pieces = list(model("One", 20, stream=True, **GREEDY))
    assert "".join(p["choices"][0]["text"] for p in pieces) == "Hi there"
    assert [p["choices"][0]["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [
        "stop"
    ]
    assert len({p["id"] for p in pieces}) == 1 and all("usage" not in p for p in pieces)


def test_chat() -> None:
    model = llm("Fine<|im_end|>" * 2)
    model.model.path = "x.gguf"
    done = model.create_chat_completion(CHAT, **GREEDY)
    assert done["object"] == "chat.completion" and done["id"].startswith("chatcmpl-")
    assert done["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Fine"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert done["usage"]["completion_tokens"] == len(ids("Fine<|im_end|>"))
    pieces = list(model.create_chat_completion(CHAT, stream=True, **GREEDY))
    assert {p["object"] for p in pieces} == {"chat.completion.chunk"}
    deltas = [p["choices"][0]["delta"] for p in pieces]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(d.get("content", "") for d in deltas) == "Fine"
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


def test_names_of_options() -> None:
    base = SamplingParams(top_k=7, max_tokens=5)
    given = {"repeat_penalty": 1.5, "stop": ["a", "b"], "seed": 3, "min_p": 0.2, "top_p": None}
    params = params_of(base, 9, given)
    assert (params.repetition_penalty, list(params.stop), params.seed) == (1.5, ["a", "b"], 3)
    assert (params.min_p, params.top_p, params.top_k, params.max_tokens) == (0.2, 0.95, 7, 9)
    assert params_of(base, None, {"seed": -1, "stop": None}) == params_of(base, -1, {})
    assert params_of(base, 0, {}).max_tokens is None
    with pytest.raises(TypeError, match="no option 'mirostat_mode'; there are temperature, top_k"):
        params_of(base, 1, {"mirostat_mode": 2})
    with pytest.raises(ImpError, match="top_p is 2"):
        params_of(base, 1, {"top_p": 2})


def test_the_shipped_model(prose_gguf: Path) -> None:
    with LLM(prose_gguf, n_ctx=128, n_threads=1) as model:
        done = model("It was a", max_tokens=8, seed=4, temperature=0.7)
        want = model.generate(
            "It was a",
            SamplingParams.from_keys(model.model.keys, seed=4, temperature=0.7, max_tokens=8),
        )[0]
        assert done["choices"][0]["text"] == want.text and done["model"] == str(prose_gguf)
        with pytest.raises(ImpError, match="the time was over"):
            model("It was a", max_tokens=None, timeout=0.0)
