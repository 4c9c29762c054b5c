"""LLM and Conversation over a scripted session, and over the shipped model."""

import time
from pathlib import Path

import pytest

from imp_runtime.conversation import Conversation
from imp_runtime.errors import ImpError
from imp_runtime.llm import LLM, Timings
from imp_runtime.sampling import SamplingParams
from imp_runtime.tokenizer import Tokenizer
from tests.text_fakes import KEYS, FakeModel, FakeSession

TOKENIZER = Tokenizer(KEYS)
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, parse_special=True)


def llm(script: str, n_ctx: int = 1000, **keys: object) -> LLM:
    return LLM.from_session(FakeModel(**keys), FakeSession(ids(script), n_ctx))


def test_generate() -> None:
    model = llm("Hello!<|im_end|>Bye<|endoftext|>")
    first, second = model.generate(["One", ids("Two")], GREEDY)
    assert (first.text, first.finish_reason) == ("Hello!", "eos")
    assert first.token_ids == ids("Hello!<|im_end|>")
    assert (second.text, second.prompt_token_ids) == ("Bye", ids("Two"))
    fed = model.session.fed
    assert fed[0] == ids("One") and [len(f) for f in fed[1:3]] == [1, 1]
    assert first.timings.prompt_tokens == len(ids("One"))
    assert first.timings.decode_tokens == len(first.token_ids) - 1
    assert model.session.n_open == 0


def test_one_text_is_one_prompt() -> None:
    assert len(llm("Hi<|im_end|>").generate("abc", GREEDY)) == 1


def test_stream_is_generate() -> None:
    chunks = list(llm("Hällo 日<|im_end|>").stream("x", GREEDY))
    assert "".join(c.text for c in chunks) == "Hällo 日"
    assert all("\ufffd" not in c.text for c in chunks)
    assert chunks[-1].finish_reason == "eos"


def test_context_is_filled_to_the_last_token() -> None:
    prompt = ids("one two three")
    n_ctx = len(prompt) + 2
    done = llm("a b c d e f", n_ctx).generate([prompt], GREEDY)[0]
    # two tokens are read back, the third is chosen from a full context
    assert (len(done.token_ids), done.finish_reason) == (3, "length")
    exact = llm("a b", len(prompt)).generate([prompt], GREEDY)[0]
    assert len(exact.token_ids) == 1
    with pytest.raises(ImpError, match=f"has {len(prompt)} tokens, the context holds {n_ctx - 3}"):
        llm("a", n_ctx - 3).generate([prompt], GREEDY)


def test_bad_prompts_are_refused_before_anything_runs() -> None:
    model = llm("a")
    for bad, message in (("", "no tokens"), ([0, 99999], "99999 is outside the vocabulary of")):
        with pytest.raises(ImpError, match=message):
            model.generate(["fine", bad], GREEDY)
    assert model.session.fed == []


def test_max_tokens_zero_runs_nothing() -> None:
    model = llm("a")
    done = model.generate("x", SamplingParams(max_tokens=0))[0]
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "length")
    assert model.session.fed == []


def test_seed_is_reported() -> None:
    model = llm("a b")
    assert model.generate("x", SamplingParams(seed=5, max_tokens=1))[0].seed == 5
    assert 0 <= model.generate("x", SamplingParams(max_tokens=1))[0].seed < 1 << 32


def test_closing_a_stream_frees_its_sequence() -> None:
    model = llm("a b c d")
    stream = model.stream("x", GREEDY)
    next(stream)
    assert model.session.n_open == 1
    stream.close()
    assert model.session.n_open == 0
    model.generate("x", SamplingParams(max_tokens=1))


def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by a second at each look."""
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    model = llm("a b c d e f g h")
    with pytest.raises(ImpError, match="^the time was over after 3 tokens$"):
        model.generate("x", GREEDY, timeout=3.5)  # looked at once before each token
    assert model.session.n_open == 0
    stream = llm("a b c d").stream("x", GREEDY, timeout=1.5)
    next(stream)
    with pytest.raises(ImpError, match="after 1 tokens"):
        next(stream)
    model = llm("a b c d")
    with pytest.raises(ImpError, match="after 0 tokens"):
        model.chat([{"role": "user", "content": "x"}], GREEDY, timeout=0)
    assert model.session.fed == []
    with pytest.raises(ImpError, match=r"^the time was over after \d tokens$"):
        list(Conversation(llm("a b c")).ask("x", GREEDY, timeout=1.5))
    long = llm("a b c", 5000)
    prompt = [5] * 1500
    with pytest.raises(ImpError, match="after 0 tokens"):
        long.generate([prompt], GREEDY, timeout=2.5)
    assert [len(f) for f in long.session.fed] == [512, 512]
    assert llm("a<|im_end|>", 5000).generate([prompt], GREEDY, timeout=500)[0].text == "a"
    for bad in (-1, float("nan")):
        with pytest.raises(ImpError, match=f"timeout is {bad} seconds, at least 0 needed"):
            model.generate("x", timeout=bad)


def test_file_defaults() -> None:
    model = llm("a", **{"general.sampling.temp": 0.0, "general.sampling.top_k": 7})
    assert (model.defaults.temperature, model.defaults.top_k) == (0.0, 7)
    model = FakeModel(**{"general.sampling.top_p": 3.0})
    session = FakeSession([])
    with pytest.raises(ImpError, match="top_p is 3"):
        LLM.from_session(model, session)
    assert model.closed and session.closed


def test_tokenizer_larger_than_the_model() -> None:
    model = FakeModel()
    model.vocab_size = 10
    with pytest.raises(ImpError, match="the tokenizer has 4100 tokens, the model only 10"):
        LLM.from_session(model, FakeSession([]))


def test_chat() -> None:
    model = llm("Fine<|im_end|>")
    done = model.chat([{"role": "user", "content": "How?"}], GREEDY)
    assert done.text == "Fine"
    expected = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    assert done.prompt_token_ids == ids(expected)
    with pytest.raises(ImpError, match=r"no tokenizer\.chat_template"):
        llm("a", **{"tokenizer.chat_template": ""}).chat([{"role": "user", "content": "x"}])


def test_close() -> None:
    with llm("a") as model:
        pass
    assert model.session.closed and model.model.closed


def ask(talk: Conversation, text: str, params: SamplingParams = GREEDY) -> str:
    return "".join(c.text for c in talk.ask(text, params))


def test_conversation_reads_only_what_is_new() -> None:
    model = llm("Yes<|im_end|>No<|im_end|>")
    talk = Conversation(model, system="Be brief")
    assert ask(talk, "A?") == "Yes" and ask(talk, "B?") == "No"
    prompts = [f for f in model.session.fed if len(f) > 1]
    assert prompts[1] == ids("<|im_end|>\n<|im_start|>user\nB?<|im_end|>\n<|im_start|>assistant\n")
    read = [t for f in model.session.fed for t in f]
    whole = model.chat_template.render(talk.messages[:-1])
    assert TOKENIZER.decode(read).startswith(whole) and model.session.n_open == 1
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]
    talk.close()
    assert model.session.n_open == 0


def test_conversation_after_an_answer_that_was_cut() -> None:
    model = llm("one two three four<|im_end|>x<|im_end|>")
    talk = Conversation(model)
    cut = ask(talk, "A?", SamplingParams(temperature=0, max_tokens=2))
    model.session.script = ids("ok<|im_end|>")
    assert ask(talk, "B?") == "ok"
    read = [t for f in model.session.fed for t in f]
    assert TOKENIZER.decode(read).startswith(
        f"<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n{cut}<|im_end|>\n"
    )


def test_conversation_reads_again_what_the_template_changed() -> None:
    template = "{% for m in messages %}{{ loop.revindex }}{{ m.content|trim }}{% endfor %}>"
    model = llm("Yes<|im_end|>No<|im_end|>", **{"tokenizer.chat_template": template})
    talk = Conversation(model)
    ask(talk, "A"), ask(talk, "B")
    assert [f for f in model.session.fed if len(f) > 1][-1] == ids("3A2Yes1B>")
    assert model.session.n_open == 1


def test_conversation_after_a_stop_text() -> None:
    model = llm("Yes STOP")
    talk = Conversation(model)
    assert ask(talk, "A", SamplingParams(temperature=0, stop=["STOP"])) == "Yes "
    assert model.session.n_open == 0  # the sequence has read what the answer does not show
    model.session.script = ids("No<|im_end|>")
    assert ask(talk, "B") == "No"


def test_conversation_too_long_stays_as_it_was() -> None:
    model = llm("Yes<|im_end|>", 40)
    talk = Conversation(model)
    ask(talk, "A")
    before = list(talk.messages)
    with pytest.raises(ImpError, match="the context holds 40"):
        talk.ask("word " * 50)
    assert talk.messages == before
    model.session.script = ids("ok<|im_end|>")
    assert ask(talk, "B") == "ok"


def test_conversation_interrupted() -> None:
    model = llm("one two three<|im_end|>")
    model.session.interrupt_at = 2
    talk = Conversation(model)
    with pytest.raises(KeyboardInterrupt):
        ask(talk, "A")
    assert talk.messages[-1]["role"] == "assistant" and model.session.n_open == 0
    model.session.script = ids("ok<|im_end|>")
    assert ask(talk, "B") == "ok"


def test_timings() -> None:
    assert Timings().prompt_per_second == 0.0 == Timings().decode_per_second
    assert Timings(10, 2.0, 6, 3.0).decode_per_second == 2.0


def test_shipped_model(prose_gguf: Path) -> None:
    with LLM(prose_gguf, n_ctx=256, n_threads=1) as model:
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
        first, second = model.generate(["It was a", "The ship"], params)
        assert first.finish_reason == "length" and len(first.token_ids) == 8
        assert first.logprobs is not None
        for token, entry in zip(first.token_ids, first.logprobs, strict=True):
            assert entry.top[0][0] == token and entry.logprob < 0  # greedy
        again = model.generate(["The ship"], params)[0]
        assert again.token_ids == second.token_ids  # whatever ran before
        seeded = [model.generate("The", SamplingParams(seed=3, max_tokens=8))[0] for _ in range(2)]
        assert seeded[0].token_ids == seeded[1].token_ids


def test_shipped_model_conversation(prose_gguf: Path) -> None:
    """A turn that continues gives what reading everything at once gives."""
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(prose_gguf, n_ctx=256, n_threads=1) as model:
        talk = Conversation(model)
        ask(talk, "Hello there", params)
        answer = ask(talk, "And more", params)
        read = talk._sequence.tokens
        talk.close()
        cut = len(read) - 5  # the last answer but its last token was read back
        assert model.generate([read[:cut]], params)[0].text == answer
