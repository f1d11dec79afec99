"""No byte that came from outside is unpickled: weights are safetensors, and everything else is JSON or protobuf."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyrl

PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
EVALUATE = {"eval", "exec", "compile"}
SOURCES = sorted(Path(skyrl.__file__).parent.rglob("*.py"))


def _said(call: ast.Call, name: str) -> object:
    """A constant that a call is given by that name."""
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def unpickles(source: str) -> Iterator[str]:
    """Lines that could run what they read."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found = [module for module in modules if module.partition(".")[0] in PICKLES]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EVALUATE:
            found.append(node.func.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called == "torch.load" and _said(node, "weights_only") is not True:
                found.append(called)
            if called in ("np.load", "numpy.load") and _said(node, "allow_pickle") not in (None, False):
                found.append(called)
            if called == "yaml.load" or called.endswith(".read_pickle"):
                found.append(called)
        yield from (f"line {node.lineno}: {name}" for name in found if isinstance(node, ast.stmt | ast.expr))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "eval(text)",
        "yaml.load(f)",
    ],
)
def test_it_is_seen(source: str) -> None:
    assert [*unpickles(source)]


@pytest.mark.parametrize(
    "source", ["torch.load(f, weights_only=True)", "np.load(f)", "model.eval()", "yaml.safe_load(f)"]
)
def test_what_is_harmless(source: str) -> None:
    assert not [*unpickles(source)]


def test_nothing_is_unpickled() -> None:
    assert len(SOURCES) > 100
    found = [f"{path.name}, {line}" for path in SOURCES for line in unpickles(path.read_text())]
    assert not found
