"""The fields of classes in sources that are read without being imported: vLLM's import takes ten seconds."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest


def fields_of(name: str) -> set[str]:
    """The annotated fields of a class of the installed vLLM, whose module and name are given."""
    module, _, wanted = name.rpartition(".")
    package = find_spec("vllm")
    if package is None or package.origin is None:
        pytest.skip("needs vLLM (make setup)")
    path = Path(package.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return annotated(path.read_text(), wanted)


def annotated(source: str, wanted: str) -> set[str]:
    """The public fields of one class of a module."""
    # Not with ast: in Python 3.11.7 a thread that logs a traceback meanwhile breaks ast.parse.
    text = re.sub(r'"""(?:.|\n)*?"""', "", source)
    (body,) = re.findall(rf"^class {wanted}\b(?:\((?:.|\n)*?\))?:.*\n((?:(?: .*)?\n)+)", text, re.MULTILINE)
    return {name for name in re.findall(r"^    (\w+):", body, re.MULTILINE) if not name.startswith("_")}
