"""Chat messages to a prompt, with the model's own jinja2 template."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from jinja2.exceptions import TemplateError

from imp_runtime.errors import ImpError
from imp_runtime.template_sandbox import MAX_TEXT, Sandbox

Message = Mapping[str, Any]  # role, content (text or a list of text parts), and what templates use


class ChatTemplate:
    """A compiled template; render() may be called from several threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile the template.

        Args:
            source: jinja2 text, as in the key tokenizer.chat_template.
            bos_token: the template's variable of that name.
            eos_token: likewise.

        Raises:
            ImpError: the template is too large or has a syntax error.
        """
        if len(source) > MAX_TEXT:
            raise ImpError(
                f"the chat template has {len(source)} characters, the limit is {MAX_TEXT}"
            )
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = Sandbox()
        self._lock = Lock()
        self._sandbox.start()  # constant parts run while compiling
        try:
            self._template = self._sandbox.from_string(source)
        except Exception as error:
            raise _refused(error) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`.

        Args:
            messages: see Message; parts of content that are not text are refused.
            add_generation_prompt: end with the start of the assistant's answer.
            tools: JSON schemas of functions the model may call.
            variables: further template variables, e.g. enable_thinking.

        Raises:
            ImpError: a message is malformed, or the template fails, refuses the messages, reaches
                for what it must not, or runs into a bound.
        """
        plain = [_plain(i, m) for i, m in enumerate(messages)]
        names: dict[str, Any] = {**self._tokens, "tools": tools, **variables}
        with self._lock:
            self._sandbox.start()
            try:
                return self._template.render(
                    messages=plain, add_generation_prompt=add_generation_prompt, **names
                )
            except Exception as error:  # the template is a program of somebody else
                raise _refused(error) from error


def render_chat(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """ChatTemplate(template).render(...) in one call; bos_token and eos_token are variables too."""
    return ChatTemplate(template).render(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
    )


def _refused(error: Exception) -> ImpError:
    if isinstance(error, TemplateError):
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        return ImpError(f"the chat template failed{place}: {error.message or error}")
    return ImpError(f"the chat template failed: {type(error).__name__}: {error}")


def _plain(number: int, message: Message) -> dict[str, Any]:
    """The message with its content as one text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ImpError(f"message {number} needs a role, one of system, user, assistant, tool")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise ImpError(f"the content of message {number} is {type(content).__name__}, not text")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ImpError(
                f"message {number} has a part of type {kind!r}; only text is supported, no images"
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}
