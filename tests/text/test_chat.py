"""Chat templates: what they can do, and what a hostile one cannot."""

from pathlib import Path

import pytest

from imp_runtime.chat import ChatTemplate, render_chat
from imp_runtime.errors import ImpError
from imp_runtime.template_sandbox import MAX_RANGE, MAX_TEXT

PROSE = Path(__file__).parents[2] / "models" / "prose-nvfp4" / "chat_template.jinja"
HELLO = [{"role": "user", "content": "Hello"}]


def test_shipped_template() -> None:
    messages = [{"role": "system", "content": "Be brief"}, *HELLO]
    text = render_chat(PROSE.read_text(encoding="utf-8"), messages)
    assert text == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    without = render_chat(PROSE.read_text(encoding="utf-8"), messages, add_generation_prompt=False)
    assert without + "<|im_start|>assistant\n" == text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks and lstrip_blocks
        ("{{ {'a': '<é> & \"q\"'} | tojson }}", '{"a": "<é> & \\"q\\""}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}", "2"),
        ("{% macro f(a, b=2) %}{{ a ~ b }}{% endmacro %}{{ f('x') }}", "x2"),
        ("{{ messages[0].content.split('l') | join('L') }}", "HeLLo"),
        ("{{ messages[::-1][0]['role'] }}{{ messages | length }}", "user1"),
        ("{{ '%s-%d' | format('a', 3) }}{{ '{:>3}'.format('b') }}{{ '%5.1f' % 2 }}", "a-3  b  2.0"),
        ("{{ 'abc'.replace('b', 'xx') | upper }}{{ ' a '.strip() }}", "AXXCa"),
        ("{{ ('a', 'b') | join(' ') | indent(2, first=true) }}", "  a b"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ tools | length if tools else 'none' }}", "none"),
        ("{{ enable_thinking }}", "True"),
        ("{{ 2 * 3 + 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "14abab[1, 2]"),
    ],
)
def test_features(template: str, expected: str) -> None:
    compiled = ChatTemplate(template, bos_token="<s>", eos_token="</s>")
    assert compiled.render(HELLO, enable_thinking=True) == expected
    assert compiled.render(HELLO, enable_thinking=True) == expected  # and again


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    template = "{{ messages[0].content }}"
    assert render_chat(template, [{"role": "user", "content": parts}]) == "ab"
    assert (
        render_chat("{{ messages[0].content is none }}", [{"role": "a", "content": None}]) == "True"
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "part of type 'image'"),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type 'text'"),
        ({"role": "user", "content": ["x"]}, "part of type 'str'"),
        ({"role": "user", "content": 3}, "content of message 0 is int"),
        ({"content": "x"}, "message 0 needs a role"),
        ("x", "message 0 needs a role"),
    ],
)
def test_malformed_messages(message: object, expected: str) -> None:
    with pytest.raises(ImpError, match=expected):
        render_chat("x", [message])


DOUBLE = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}"


def doubling(start: str, step: str, end: str = "{{ n.x }}") -> str:
    return DOUBLE.replace("START", start).replace("STEP", step) + end


HOSTILE = {
    "internals": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
    "internals by filter": ("{{ (''|attr('__class__')).x }}", "unsafe|undefined"),
    "globals": ("{{ raise_exception.__globals__['os'] }}", "unsafe"),
    "change a message": ("{{ messages.append(1) }}", "unsafe"),
    "loop": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "loop steps|seconds",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "many calls": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "loop steps|seconds",
    ),
    "range": (f"{{% for a in range({MAX_RANGE + 1}) %}}{{% endfor %}}", f"{MAX_RANGE + 1} numbers"),
    "long text": (f"{{{{ 'a' * {MAX_TEXT + 1} }}}}", "grows"),
    "long list": (f"{{{{ [1] * {MAX_TEXT + 1} }}}}", "grows"),
    "power": ("{{ 2 ** 10000000000 }}", "power 10000000000"),
    "numbers": (doubling("3", "n.x * n.x"), r"above 2\^64"),
    "doubled by ~": (doubling("'ab'", "n.x ~ n.x"), "grows"),
    "doubled line by line": ("{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60, "grows"),
    "doubled by +": (doubling("'ab'", "n.x + n.x"), "grows"),
    "doubled by a block": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}"
        "{% endset %}{% set n.x = y %}{% endfor %}",
        "grows",
    ),
    "nested lists": (doubling("[1]", "[n.x, n.x]"), "grows"),
    "nested tuples, compared": (doubling("[1]", "(n.x, n.x)", "{{ n.x == n.x }}"), "grows"),
    "nested mappings": (doubling("1", "dict(a=n.x, b=n.x)", "{{ n.x | tojson }}"), "grows"),
    "namespace in itself": ("{% set n = namespace(x=1) %}{% set n.x = n %}{{ n }}", "namespace"),
    "padding": ("{{ 'a'.ljust(10000000000) }}", "grows"),
    "padding filter": ("{{ 'a' | center(10000000000) }}", "grows"),
    "format": ("{{ '%1000000000d' % 1 }}", "very large width"),
    "format filter": ("{{ '%1000000000d' | format(1) }}", "very large width"),
    "format method": ("{{ '{:1000000000d}'.format(1) }}", "very large width"),
    "width from a value": ("{{ '%*d' % (1000000000, 1) }}", "very large width"),
    "replace": ("{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}", "grows"),
    "replace filter": ("{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}", "grows"),
    "join": ("{% set a = 'a' * 100000 %}{{ a.join(a) }}", "grows"),
    "join filter": ("{% set a = 'a' * 100000 %}{{ a | join(a) }}", "grows"),
    "indent": ("{% set a = '\n' * 100000 %}{{ a | indent(100000) }}", "grows"),
    "slices": ("{{ [1] | slice(1000000000) | list }}", "grows"),
    "translate": ("{{ 'a'.translate({97: 'b'}) }}", "'translate' is not available"),
    "filler": ("{{ lipsum(100000) }}", "'lipsum' is undefined"),
    "files": ("{% include '/etc/passwd' %}", "no loader"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    template, message = HOSTILE[name]
    with pytest.raises(ImpError, match=message) as error:
        render_chat(template, HELLO)
    assert "\n" not in str(error.value) and "chat template failed" in str(error.value)


def test_limits_are_reached() -> None:
    assert len(render_chat(f"{{{{ 'a' * {MAX_TEXT} }}}}", HELLO)) == MAX_TEXT
    counted = f"{{% for a in range({MAX_RANGE}) %}}.{{% endfor %}}"
    assert len(render_chat(counted, HELLO)) == MAX_RANGE


def test_errors_of_the_template() -> None:
    with pytest.raises(ImpError, match="failed: Conversation roles must alternate"):
        render_chat("{{ raise_exception('Conversation roles must alternate') }}", HELLO)
    with pytest.raises(ImpError, match=r"failed \(line 2\)"):
        ChatTemplate("a\n{% for %}")
    with pytest.raises(ImpError, match="the limit is"):
        ChatTemplate(" " * (MAX_TEXT + 1))
