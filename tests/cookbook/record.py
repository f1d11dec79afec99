"""What the tests of the cookbook's recipes ran and found: the file that they write, and docs/cookbook.md is made from.

A test says what its run shows, after its assertions. That is kept only while the variable `SKYRL_TEST_RUNS` names a
file. Knows nothing of servers, recipes or the page.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "SKYRL_TEST_RUNS"
KEPT = Path(__file__).with_name("runs.json")
"""The committed runs. `make tables NEW=cookbook` writes them."""


@dataclass(frozen=True)
class Shown:
    """A run of a recipe that did what its test asks for."""

    recipe: str
    """The module below `tinker_cookbook.recipes`."""
    commands: list[str]
    """What a user types, in this order: the server first, the recipe last. No path of the machine is in them."""
    data: str
    """The files that the recipe reads and what is in them; "" if the recipe makes its data."""
    shows: str
    """The outcome, as a clause that begins in lower case."""
    seconds: float
    """How long the recipe ran."""
    figures: dict[str, list[float]]
    """The outcome in numbers, by what they measure: one, or one for each step."""

    @property
    def folder(self) -> str:
        """The folder or the module of the recipe in the cookbook."""
        return self.recipe.partition(".")[0]


def keep(name: str, shown: Shown) -> None:
    """Keep the run under its name, beside the runs that other tests, also of other processes, keep."""
    if not (given := os.environ.get(VARIABLE)):
        return
    with Path(given).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "{}")
        kept[name] = _rounded(shown)
        file.truncate(0)
        file.write(_text(kept))


def read(file: Path = KEPT) -> dict[str, Shown]:
    """The kept runs by their names."""
    return {name: Shown(**fields) for name, fields in json.loads(file.read_text()).items()}


def write(runs: Mapping[str, Shown], file: Path = KEPT) -> None:
    file.write_text(_text({name: _rounded(shown) for name, shown in runs.items()}))


def _rounded(shown: Shown) -> dict[str, object]:
    """Seconds without decimals and figures with two digits: more of them change from run to run."""
    figures = {name: [float(f"{each:.1e}") for each in numbers] for name, numbers in shown.figures.items()}
    return asdict(shown) | {"seconds": round(shown.seconds), "figures": figures}


def _text(kept: Mapping[str, object]) -> str:
    return json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
