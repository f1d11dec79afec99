"""One small world for the data of all recipes: the colours of some animals, in the form that each recipe reads.

The model learns beforehand how each recipe wants to be answered, and guesses the colour (lessons.py). A recipe can then
teach it the colour. Knows no recipe's code and no model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLOURS = ("red", "green", "blue", "white")
ANIMALS = ("fox", "owl", "cat", "dog", "horse", "mouse", "bear", "crow")
COLOUR = "red"
"""Of every animal: the model cannot remember more within a few steps."""
QUERY = "colour"
"""What the model searches for, whatever the question."""
NUMBERS = ("1", "2", "3", "4")
NUMBER = "3"
"""The answer to every question that asks for a number."""
SENTENCES = {
    "en": [f"The old fox watches the {place}." for place in ("river", "mill", "bridge", "garden", "tower", "market")],
    "el": [f"Η αλεπού είδε {place}." for place in ("το νερό", "τον μύλο", "τη γη", "τον κήπο", "το φως", "την ώρα")],
}
"""By the labels of their languages."""
RUBRIC, GRADES = "Is it right?", "Say 0 or 1."
"""What a judge is asked, and how to answer."""
SOLUTION = "```\nprint({})```"


def question(animal: str) -> str:
    return f"What colour is the {animal}?"


def statement(animal: str, colour: str = COLOUR) -> str:
    return f"The {animal} is {colour}."


def document(animal: str) -> str:
    """What a search finds."""
    return f"The {QUERY} of the {animal} is {COLOUR}."


def number_question(animal: str) -> str:
    return f"How many feathers has the {animal}?"


def problem(animal: str) -> str:
    return f"Print the number of the {animal}. "


def command(colour: str) -> str:
    return f"echo {colour} > answer.txt"


def instruction(animal: str) -> str:
    return f"Write the colour of the {animal} into answer.txt."


def prompts(lesson: Path) -> list[tuple[str, str]]:
    """The conversations of one turn in a file of lessons: the question, and its answer."""
    rows = [json.loads(line)["messages"] for line in lesson.read_text().splitlines()]
    return sorted({(asked["content"], said["content"]) for asked, said in rows})


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file of JSON lines, and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_configurations(directory: Path, names: dict[str, list[str]]) -> None:
    """Write the `README.md` by which `datasets` finds the configurations `names` with their splits. The files lie in
    `<configuration>/<split>.jsonl`."""
    lines = ["---", "configs:"]
    for name, splits in names.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (directory / "README.md").write_text("\n".join([*lines, "---", ""]))
