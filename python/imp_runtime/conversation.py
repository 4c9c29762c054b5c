"""A chat over several turns that keeps the model's state between them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from imp_runtime.engine import deadline_of
from imp_runtime.generation import Chunk
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Sequence as TokenSequence

if TYPE_CHECKING:
    from imp_runtime.llm import LLM, Stream


class Conversation:
    """Messages so far, and the sequence that has read them.

    A turn reads only what is new. Where the template rewrites earlier messages (some drop old
    reasoning) the whole conversation is read again.
    """

    def __init__(self, llm: "LLM", system: str | None = None, **variables: Any) -> None:
        """Start without reading anything.

        Args:
            llm: its session must have a free sequence.
            system: text of the system message.
            variables: for the template, e.g. enable_thinking.
        """
        self._llm = llm
        self._variables = variables
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._sequence: TokenSequence | None = None
        self._read = ""  # the text whose tokens are in the sequence, or in _pending
        self._pending: list[int] = []  # chosen, but not yet read

    def ask(
        self, text: str, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> "Stream":
        """Add a user message and stream the answer, which is kept as far as it is consumed.

        Raises:
            ImpError: the conversation is longer than the context (it stays as it was before), the
                template refuses it, or the `timeout` in seconds was over.
        """
        from imp_runtime.llm import Stream, check_room

        llm, deadline = self._llm, deadline_of(timeout)
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = llm.chat_template.render(messages, **self._variables)
        continued = self._sequence is not None and prompt.startswith(self._read)
        suffix = prompt[len(self._read) :] if continued else prompt
        new = llm.tokenizer.encode(suffix, add_special=False, parse_special=True)
        if continued and self._sequence is not None:
            new = [*self._pending, *new]
            check_room(self._sequence.length + len(new), llm.n_ctx)
        else:
            check_room(len(new), llm.n_ctx)
            self._forget()
        stream = Stream(iter(()), new, (params or llm.defaults).with_seed())
        stream.chunks = self._answer(stream, messages, prompt, deadline)
        return stream

    def close(self) -> None:
        """Free the sequence."""
        self._forget()

    def _forget(self) -> None:
        if self._sequence is not None:
            self._sequence.close()
        self._sequence, self._read, self._pending = None, "", []

    def _answer(
        self,
        stream: "Stream",
        messages: list[dict[str, Any]],
        prompt: str,
        deadline: float | None,
    ) -> Iterator[Chunk]:
        from imp_runtime.llm import drive

        llm = self._llm
        sequence = self._sequence or llm.session.open()
        self._sequence = sequence
        chunks: list[Chunk] = []
        intact = False  # whether the sequence holds exactly what was chosen, but the last token
        try:
            for chunk in drive(
                sequence,
                llm.tokenizer,
                stream.prompt_token_ids,
                stream.params,
                llm.n_ctx,
                (stream.timings, llm.timings),
                deadline,
            ):
                chunks.append(chunk)
                intact = True
                yield chunk
                intact = False
            intact = bool(chunks)
        finally:
            text = "".join(c.text for c in chunks)
            if chunks:
                self.messages = [*messages, {"role": "assistant", "content": text}]
            if intact and chunks[-1].finish_reason != "stop":
                last = chunks[-1].token_id
                self._pending = [] if last in llm.tokenizer.eos_ids else [last]
                self._read = prompt + text
            else:  # interrupted inside a step, or tokens of a stop text are in the sequence
                self._forget()
