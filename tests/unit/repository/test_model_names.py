"""Pages and configurations name only released models that the server takes.

A page may name a model that the server refuses, if it says so in a comment, which does not show on the page:
`<!-- not served: Qwen/Qwen3.5-9B -->`. In a block of code such a model is never allowed.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.architectures import cookbook, figures
from tests.architectures.page import verdicts
from tests.families import FAMILIES, MIXTURES

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs/reference/architectures.md"
PARSERS = ROOT / "docs/reference/parsers.md"
"""Lists released models whether the trainer takes them or not, and says so."""
FOLDERS = ("docs", "examples", "deploy", "benchmarks")
TEXT = {".md", ".py", ".toml", ".yaml", ".yml"}
FILES = sorted(
    {*ROOT.glob("*.md"), *(file for name in FOLDERS for file in (ROOT / name).rglob("*") if file.suffix in TEXT)}
    - {PARSERS}
)

_RELEASED = re.compile(
    r"(?<![\w.-])(?P<family>[A-Za-z]\w*(?:[.-]\w+)*?)-\d+(?:\.\d+)?[Bb](?![\w.]*\w)(?P<rest>(?:-\w+(?:\.\w+)*)*)"
)
"""A released model's name, such as Qwen3-30B-A3B-Instruct-2507: its family, its billions of parameters, the rest."""
_OPTION = re.compile(
    r"(?:--(?:base-model|served-model-name)[ =]|\b(?:SKYRL_BASE_MODEL|base_model|model_name)\s?[=:]\s?)"
    r"[\"']?(?P<model>[A-Za-z][\w-]*/[\w.-]*\w)"
)
"""A model of the hub that an option names."""
_BLOCK = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
_OF_THE_COOKBOOK = re.compile(r"^## The cookbook's models\n.*?^## ", re.M | re.S)
"""The part of the table that says itself which models are not served."""
_NOT_SERVED = re.compile(r"<!-- not served: (.+?) -->")


def families_served() -> list[tuple[str, str]]:
    """The families in the table of architectures, as names of models write them, each with its `model_type`."""
    cells = re.findall(r"(?:^\| |(?<=`\)), )([^|`]+) \(`(\w+)`\)", TABLE.read_text(), re.M)
    return [
        (name.strip().lower().replace(" ", "-"), model_type)
        for cell, model_type in cells
        for name in re.sub(r"\[.*?\]|\(.*?\)", "", cell).split(",")
    ]


def models_in(text: str) -> list[str]:
    """The released models that the text names, without their owners."""
    options = [match["model"].rpartition("/")[2] for match in _OPTION.finditer(text)]
    return [*options, *(match[0] for match in _RELEASED.finditer(text))]


@cache
def cookbooks_models() -> dict[str, bool]:
    """The models that the cookbook names, without their owners: whether the trainer takes them."""
    return {each.model.rpartition("/")[2]: each.trains for each in verdicts(figures.read(), cookbook.listed())}


def is_served(model: str) -> bool:
    if model in cookbooks_models():
        return cookbooks_models()[model]
    match = _RELEASED.fullmatch(model)
    if match is None:
        return False
    mixture = re.search(r"-A\d+(\.\d+)?B", match["rest"]) is not None
    return match["family"].lower() + ("-moe" if mixture else "") in dict(families_served())


def refused_in(text: str) -> set[str]:
    return {model for model in models_in(text) if not is_served(model)}


def marked_in(text: str) -> set[str]:
    """The models that a page says are not served."""
    return {name.strip().rpartition("/")[2] for marks in _NOT_SERVED.findall(text) for name in marks.split(",")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_page_names_a_model_that_the_server_refuses_only_with_a_mark(file: Path) -> None:
    text = file.read_text()
    if file == TABLE:
        text = _OF_THE_COOKBOOK.sub("", text)
    prose = _NOT_SERVED.sub("", _BLOCK.sub("", text)) if file.suffix == ".md" else ""
    blocks = "\n".join(match[0] for match in _BLOCK.finditer(text)) if file.suffix == ".md" else text
    assert refused_in(blocks) == set(), f"not in the table of {TABLE.relative_to(ROOT)}, and in a block of code"
    assert refused_in(prose) == marked_in(text), "the models that the page names, and those that it says are not served"


def test_the_table_of_architectures_lists_the_families_that_tests_try() -> None:
    tried = {settings["model_type"] for settings in (*FAMILIES.values(), *MIXTURES.values())}
    assert {model_type for _, model_type in families_served()} == tried


def test_models_are_found_and_refused_ones_noticed() -> None:
    assert models_in("in /models/Qwen3-0.6B, and openai/gpt-oss-20b.") == ["Qwen3-0.6B", "gpt-oss-20b"]
    assert models_in('`base_model = "microsoft/phi-4"`, --base-model tiny') == ["phi-4"]
    served = ["Qwen3-30B-A3B-Instruct-2507", "Qwen3.5-4B", "Qwen3-4B-Instruct-2507", "Qwen2.5-7B", "Qwen3-0.6B"]
    refused = ["Qwen9-4B", "Qwen9-VL-30B-A3B-Instruct", "gpt-new-20b", "Mistral-8B-A2B", "phi-4"]
    assert [model for model in (*served, *refused) if is_served(model)] == served
    assert marked_in("<!-- not served: Qwen/Qwen3.5-9B, gpt-oss-20b -->") == {"Qwen3.5-9B", "gpt-oss-20b"}
    assert sum(len(models_in(file.read_text())) for file in FILES) > 20
