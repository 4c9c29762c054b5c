"""A jinja2 environment for templates that come with model files and are not trusted.

jinja2's sandbox keeps a template away from Python's internals. Here it also gets bounds on time and
memory: loops and macro calls are counted, text and lists cannot grow past a limit.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT = 4 << 20  # characters of any text and of the result
ITEM_WEIGHT = 8  # an entry of a list or mapping counts as this many characters
MAX_RANGE = 10_000
MAX_NUMBER = 1 << 64  # of a whole number
MAX_STEPS = 500_000  # loop iterations and macro calls of one rendering
MAX_SECONDS = 10.0

_SAFE_STR_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper lower lstrip partition "
    "removeprefix removesuffix rfind rindex rpartition rsplit rstrip split splitlines startswith "
    "strip swapcase title upper".split()
)
# Filters that look at their input without writing it out; weighing it each time would be slow.
_NOT_WRITTEN = frozenset(
    "count d default first items last length list map reject rejectattr select selectattr".split()
)
_PADDING = frozenset(("center", "ljust", "rjust", "zfill"))
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")  # a width of 10,000 on, or taken from a value


class TemplateLimit(TemplateRuntimeError):
    """A template ran into one of the bounds."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one chat template; renders one at a time."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=_weighed,
            cache_size=0,
        )
        self._steps = 0
        self._deadline = 0.0
        del self.globals["lipsum"]
        self.globals["range"] = _range
        self.globals["dict"] = lambda *args, **kwargs: _weighed(dict(*args, **kwargs))
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.filters = {name: _bounded(name, f) for name, f in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.filters["string"] = lambda value: str(_weighed(value))

    def start(self) -> None:
        """Reset the bounds on time for a new rendering."""
        self._steps = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> str:
        """Count one step; compiled templates call this in every loop and macro body."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateLimit(f"it takes more than {MAX_STEPS} loop steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} seconds")
        return ""

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join output; also what `~`, block assignments and macros are built with."""
        kept: list[str] = []
        total = 0
        for part in parts:
            total += len(part)
            if total > MAX_TEXT:
                raise TemplateLimit(f"its text grows past {MAX_TEXT} characters")
            kept.append(part)
        return "".join(kept)

    def join_values(self, *values: Any) -> str:
        """The `~` operator."""
        return self.concat(str(_weighed(v)) for v in values)

    @staticmethod
    def weighed(value: Any) -> Any:
        """A list or mapping that the template wrote."""
        return _weighed(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic that can make large values."""
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(times, int):
                    _check_size(_weight(sized) * max(times, 0))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(_weight(left) + _weight(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "**" and isinstance(right, int) and right > 64:
            raise TemplateLimit(f"it raises to the power {right}, the limit is 64")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) > MAX_NUMBER:
            raise TemplateLimit("it calculates with whole numbers above 2^64")
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        """Call from a template; methods of text are checked for the size they make."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _checked(__obj.__name__, owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method format of a text; format_map is not available."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = str(value.__self__)

        def run(*args: Any, **kwargs: Any) -> str:
            _check_format(text, [*args, *kwargs.values()])
            return str(wrapped(*args, **kwargs))

        return run if value.__name__ == "format" else None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then put the counting call into every body that may run again."""
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            step = nodes.ExprStmt(_call("spend", [], node.lineno), lineno=node.lineno)
            body: list[nodes.Node] = getattr(node, "body")  # noqa: B009
            body.insert(0, step)
        bounded: nodes.Template = _bounded_tree(tree)
        return bounded


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """namespace() of templates, whose values cannot hold each other without bound."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _weighed(dict(*args, **kwargs))

    def __setitem__(self, name: str, value: Any) -> None:
        _weighed([value])
        super().__setitem__(name, value)


def _bounded_tree(node: nodes.Node) -> Any:
    """Turn each `a ~ b` into a bounded call, and weigh each list and mapping that is written."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            items = [_bounded_tree(v) if isinstance(v, nodes.Node) else v for v in value]
            setattr(node, field, items)
        elif isinstance(value, nodes.Node):
            setattr(node, field, _bounded_tree(value))
    if isinstance(node, nodes.Concat):
        return _call("join_values", node.nodes, node.lineno)
    if isinstance(node, nodes.List | nodes.Dict | nodes.Tuple):
        target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if target else _call("weighed", [node], node.lineno)
    return node


def _call(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None, lineno=line)


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimit(f"a range has {len(numbers)} numbers, the limit is {MAX_RANGE}")
    return numbers


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRuntimeError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that jinja2's own filter makes."""
    _check_size((indent or 0) * 1000)
    return json.dumps(
        _weighed(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise TemplateLimit(f"a value grows to {size} characters or items, the limit is {MAX_TEXT}")


def _check_format(form: str, values: object) -> None:
    if _WIDE_FORMAT.search(form):
        raise SecurityError("a format with a very large width, or one taken from a value")
    _weighed(values)


def _weighed(value: Any) -> Any:
    """`value`, unless it is too large written out (a list may hold another many times)."""
    _check_size(_weight(value))
    return value


def _weight(value: Any) -> int:
    """Characters that `value` takes written out, about; stops soon after MAX_TEXT."""
    total = 0
    pending = [value]
    while pending and total <= MAX_TEXT:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += ITEM_WEIGHT * len(item)
            pending.extend(item)
        elif item is None or isinstance(item, (int, float)):
            continue
        elif isinstance(item, Mapping):
            total += ITEM_WEIGHT * len(item)
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, Namespace) and item is not value:
            raise TemplateLimit("a namespace is put into another value")
    return total


def _checked(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments for a method of `text`, after bounding what it returns."""
    if name in _SAFE_STR_METHODS:
        return args
    numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, int)]
    if name in _PADDING:
        _check_size(max(numbers, default=0))
    elif name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and len(args) == 1:
        items = list(args[0])
        _check_size(sum(len(i) + len(text) for i in items if isinstance(i, str)))
        return (items,)
    else:
        raise SecurityError(f"the text method {name!r} is not available")
    return args


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A built-in filter that checks its arguments and its result."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the context, if it takes one

    @wraps(function)  # keeps that mark
    def run(*args: Any, **kwargs: Any) -> Any:
        if name == "join" and len(args) > first:
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        values = [*args[first:], *kwargs.values()]
        if name not in _NOT_WRITTEN:
            for value in values:
                _weighed(value)
        text, *rest = values or [""]
        numbers = [v for v in rest if isinstance(v, int)]
        longest = max((len(v) for v in rest if isinstance(v, str)), default=0)
        _check_size(max(numbers, default=0) * ITEM_WEIGHT)
        if name == "indent":
            lines = str(text).count("\n") + 1
            _check_size(lines * max(longest, *numbers, 4))
        elif name == "replace":
            _checked(name, str(text), tuple(rest), {})
        elif name == "join":
            _check_size(len(text) * longest)
        elif name == "format":
            _check_format(str(text), rest)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            _check_size(len(result))
        return result

    return run
