"""The recipes of the installed cookbook, and what those need that do not run here.

The cookbook is in an environment of its own (`requirements/cookbook.txt`). Knows nothing of the runs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.environments import ROOT, environment

LISTING = Path(__file__).with_name("recipes.json")
"""What `installed` returned when the page was made."""

NEEDS = {"audio": "a model of sound; skyrl serves models of text and pictures"}
"""By the recipes of which no run is kept."""

_PROGRAM = """
import json
from pathlib import Path
import tinker_cookbook.recipes as recipes

(folder,) = recipes.__path__
parts = [part for part in Path(folder).iterdir() if part.suffix == ".py" or any(part.rglob("*.py"))]
print(json.dumps(sorted(part.stem for part in parts if not part.name.startswith("_"))))
"""


def installed() -> list[str]:
    """The folders and modules of recipes in the release that `requirements/cookbook.txt` pins. Makes its environment
    if there is none."""
    python = environment(ROOT / "requirements" / "cookbook.txt")
    done = subprocess.run([python, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def listed() -> list[str]:
    """What the page is made from."""
    return json.loads(LISTING.read_text())


def write(recipes: list[str]) -> None:
    LISTING.write_text(json.dumps(recipes, indent=1) + "\n")
