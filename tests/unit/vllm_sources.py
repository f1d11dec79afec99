"""The fields of classes of the installed vLLM, read without importing vLLM, which takes ten seconds."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest


def fields_of(name: str) -> set[str]:
    """The annotated fields of a class."""
    module, _, wanted = name.rpartition(".")
    package = find_spec("vllm")
    if package is None or package.origin is None:
        pytest.skip("needs vLLM (make setup)")
    path = Path(package.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    # Not with ast: in Python 3.11.7 a thread that logs a traceback meanwhile breaks ast.parse.
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text())
    (body,) = re.findall(rf"^class {wanted}\((?:.|\n)*?\):.*\n((?:(?: .*)?\n)+)", text, re.MULTILINE)
    return set(re.findall(r"^    (\w+):", body, re.MULTILINE))
