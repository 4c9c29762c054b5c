"""Calls and results in the shape of llama-cpp-python (and of OpenAI's API) over an LLM."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from imp_runtime.chat import Message
from imp_runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from imp_runtime.llm import LLM, Prompt, Stream

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "seed": "seed",
}
"""Names of llama-cpp-python, and of SamplingParams."""
_FINISH = {"eos": "stop", "stop": "stop", "length": "length", None: None}


class CompletionDicts:
    """What LLM, its only subclass, offers to code that was written for llama-cpp-python."""

    def __call__(
        self,
        prompt: Prompt,
        max_tokens: int | None = 16,
        *,
        echo: bool = False,
        stream: bool = False,
        timeout: float | None = None,
        **sampling: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Complete one prompt; create_completion is the same.

        Args:
            prompt: text or token ids.
            max_tokens: None or less than 1 = until the context is full.
            echo: put the prompt before the text.
            stream: give an iterator over pieces instead.
            timeout: seconds.
            sampling: temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
                frequency_penalty, stop, seed; those not given are the file's own.

        Returns:
            {"id", "object": "text_completion", "created", "model", "choices": [{"text", "index",
            "logprobs", "finish_reason"}], "usage"}; a piece has no usage.

        Raises:
            ImpError: as generate().
            TypeError: an option that is not there.
        """
        llm = cast("LLM", self)
        head = _head("cmpl", "text_completion", llm.model.path)
        params = params_of(llm.defaults, max_tokens, sampling)
        running = llm.stream(prompt, params, timeout=timeout)
        first = llm.tokenizer.decode(running.prompt_token_ids) if echo else ""
        pieces = _text_pieces(head, first, running)
        return pieces if stream else _whole_text(head, running, list(pieces))

    create_completion = __call__

    def create_chat_completion(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **sampling: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """The assistant's answer; arguments as for a completion.

        Returns:
            {"id", "object": "chat.completion", "created", "model", "choices": [{"index",
            "message": {"role", "content"}, "logprobs", "finish_reason"}], "usage"}; a piece is a
            "chat.completion.chunk", whose choices have a "delta".

        Raises:
            ImpError: as chat().
            TypeError: an option that is not there.
        """
        llm = cast("LLM", self)
        kind = "chat.completion.chunk" if stream else "chat.completion"
        head = _head("chatcmpl", kind, llm.model.path)
        params = params_of(llm.defaults, max_tokens, sampling)
        running = llm.stream_chat(messages, params, tools=tools, timeout=timeout)
        pieces = _chat_pieces(head, running)
        return pieces if stream else _whole_chat(head, running, list(pieces))


def params_of(
    defaults: SamplingParams, max_tokens: int | None, sampling: dict[str, Any]
) -> SamplingParams:
    """The parameters under llama-cpp-python's names. Raises TypeError for one that is not there."""
    values: dict[str, Any] = {}
    for name, value in sampling.items():
        if name not in _SAMPLING:
            raise TypeError(f"no option {name!r}; there are {', '.join(_SAMPLING)}")
        if value is not None and not (name == "seed" and value == -1):
            values[_SAMPLING[name]] = value
    endless = max_tokens is None or max_tokens < 1
    return replace(defaults, max_tokens=None if endless else max_tokens, **values)


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4()}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage(stream: Stream, tokens: int) -> dict[str, int]:
    prompt = len(stream.prompt_token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
    }


def _text_pieces(head: dict[str, Any], first: str, stream: Stream) -> Iterator[dict[str, Any]]:
    for chunk in stream:
        choice = {
            "text": first + chunk.text,
            "index": 0,
            "logprobs": None,
            "finish_reason": _FINISH[chunk.finish_reason],
        }
        first = ""
        yield {**head, "choices": [choice]}


def _whole_text(
    head: dict[str, Any], stream: Stream, pieces: list[dict[str, Any]]
) -> dict[str, Any]:
    choices = [piece["choices"][0] for piece in pieces]
    text = "".join(c["text"] for c in choices)
    return {
        **head,
        "choices": [{**choices[-1], "text": text}],
        "usage": _usage(stream, len(pieces)),
    }


def _chat_pieces(head: dict[str, Any], stream: Stream) -> Iterator[dict[str, Any]]:
    def piece(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice]}

    yield piece({"role": "assistant"})
    for chunk in stream:
        delta = {"content": chunk.text} if chunk.text else {}
        yield piece(delta, _FINISH[chunk.finish_reason])


def _whole_chat(
    head: dict[str, Any], stream: Stream, pieces: list[dict[str, Any]]
) -> dict[str, Any]:
    deltas = [piece["choices"][0] for piece in pieces]
    text = "".join(d["delta"].get("content", "") for d in deltas)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": None,
        "finish_reason": deltas[-1]["finish_reason"],
    }
    return {**head, "choices": [choice], "usage": _usage(stream, len(pieces) - 1)}
