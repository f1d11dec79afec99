"""skyrl unpickles nothing: weights are safetensors, and all other data is JSON or protobuf."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyrl

PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
EVALUATE = {"eval", "exec", "compile"}
SOURCES = sorted(Path(skyrl.__file__).parent.rglob("*.py"))


def _constant_argument(call: ast.Call, name: str) -> object:
    """The keyword argument `name` of a call if it is a constant, else None."""
    values = (keyword.value for keyword in call.keywords if keyword.arg == name)
    return next((value.value for value in values if isinstance(value, ast.Constant)), None)


def unpickles(source: str) -> Iterator[str]:
    """The lines of `source` that could run code which they read."""
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
            if called == "torch.load" and _constant_argument(node, "weights_only") is not True:
                found.append(called)
            if called in ("np.load", "numpy.load") and _constant_argument(node, "allow_pickle") not in (None, False):
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
def test_unpickling_and_evaluation_are_found(source: str) -> None:
    assert [*unpickles(source)]


@pytest.mark.parametrize(
    "source", ["torch.load(f, weights_only=True)", "np.load(f)", "model.eval()", "yaml.safe_load(f)"]
)
def test_harmless_calls_are_not_reported(source: str) -> None:
    assert not [*unpickles(source)]


def test_skyrl_unpickles_nothing() -> None:
    assert len(SOURCES) > 100
    found = [f"{path.name}, {line}" for path in SOURCES for line in unpickles(path.read_text())]
    assert not found
