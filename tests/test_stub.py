"""_core.pyi says what the extension really offers: names, arguments, defaults and types."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imp_runtime
from imp_runtime import _core

STUB = Path(imp_runtime.__file__).with_name("_core.pyi")


def plain(annotation: ast.expr | None) -> str:
    """A type without module names, arrays as NDArray[dtype], a dict without its arguments."""
    text = re.sub(r"\b(?:[a-z_]+\.)+", "", ast.unparse(annotation) if annotation else "")
    return re.sub(r"^dict\[.*\]$", "dict", text)


def describe(f: ast.FunctionDef) -> tuple[str, ...]:
    """Every argument with its type and default, and the result's type."""
    a = f.args
    assert not (a.posonlyargs or a.vararg or a.kwarg), f.name
    defaults: list[ast.expr | None] = [None] * (len(a.args) - len(a.defaults)) + list(a.defaults)
    out = []
    for arg, default in [*zip(a.args, defaults, strict=True)]:
        out.append(f"{arg.arg}: {plain(arg.annotation)} {default and ast.unparse(default)}")
    for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        out.append(f"*{arg.arg}: {plain(arg.annotation)} {default and ast.unparse(default)}")
    return (*out, f"-> {plain(f.returns)}")


def of_core(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """The same from the signature that the binding carries."""
    ((signature, _, defaults),) = function.__nb_signature__  # type: ignore[attr-defined]
    text = re.sub(r"(?:numpy\.)?ndarray\[dtype=(\w+)[^\]]*\]", r"NDArray[\1]", signature)
    for i, value in enumerate(defaults or ()):
        text = re.sub(rf"\\{i}\b", repr(value), text)
    text = re.sub(r"^def \w*", f"def {name}", text) + ": ..."
    parsed = ast.parse(text).body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return describe(parsed)


def core_members(thing: Any) -> dict[str, tuple[str, ...]]:
    """name -> description of the functions and properties of the module or of a class"""
    out = {}
    for name, member in vars(thing).items():
        if isinstance(member, property):
            assert member.fset is None
            out[name] = ("property", *of_core(member.fget, name))  # type: ignore[arg-type]
            continue
        function = getattr(member, "__func__", member)
        if name.startswith("__") and name != "__init__":
            continue
        if hasattr(function, "__nb_signature__"):
            out[name] = of_core(function, name)
    return out


def stub_members(body: list[ast.stmt]) -> dict[str, tuple[str, ...]]:
    out = {}
    for f in body:
        if isinstance(f, ast.FunctionDef):
            decorators = [ast.unparse(d) for d in f.decorator_list]
            out[f.name] = (*("property" for d in decorators if d == "property"), *describe(f))
    return out


def test_stub_is_the_extension() -> None:
    tree = ast.parse(STUB.read_text())
    classes = {c.name: c for c in tree.body if isinstance(c, ast.ClassDef)}
    assert stub_members(tree.body) == core_members(_core)
    real = {n: c for n, c in vars(_core).items() if isinstance(c, type) and n != "Error"}
    assert set(classes) == set(real)
    for name, c in real.items():
        assert stub_members(classes[name].body) == core_members(c), name


def test_static_methods_are_static() -> None:
    tree = ast.parse(STUB.read_text())
    for c in tree.body:
        for f in getattr(c, "body", []):
            if isinstance(f, ast.FunctionDef) and "self" not in [a.arg for a in f.args.args]:
                assert [ast.unparse(d) for d in f.decorator_list] == ["staticmethod"], f.name


def test_error_is_the_exception_of_the_package() -> None:
    assert _core.Error is imp_runtime.ImpError
