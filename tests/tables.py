"""Writes every generated table of the pages: `python -m tests.tables [NEW [OPTION...]]`, or `make tables`.

The tables are made from what the repository keeps. NEW first renews what is kept for one of them:

    models         the cookbook's models and recipes, from the release that `requirements/cookbook.txt` pins
    architectures  runs the tests of base-model families; options go to pytest, so that a few families can be measured
    cookbook       runs the cookbook's recipes, likewise
    compatibility  runs the checks of every released SDK
    agents         asks the newest Codex of npm for its kinds of items

Equal records give equal pages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import import_drawing
from tests.agents import kinds
from tests.architectures import cookbook, figures, page, parsers_page
from tests.cookbook import page as cookbook_page
from tests.cookbook import recipes, record
from tests.e2e.sdk import table
from tests.environments import ROOT

FAMILIES = (
    "tests/unit/trainer/test_families.py",
    "tests/unit/trainer/test_mixture_families.py",
    "tests/unit/trainer/test_refused_models.py",
    "tests/component/inference/test_families_vllm.py",
)
PAGES: dict[Path, Callable[[], str]] = {
    page.PAGE: lambda: page.render(figures.read(), cookbook.listed()),
    parsers_page.PAGE: parsers_page.render,
    cookbook_page.PAGE: lambda: cookbook_page.render(
        cookbook_page.PAGE.read_text(), record.read(), recipes.listed(), recipes.NEEDS
    ),
    table.PAGE: lambda: table.render(table.read()),
    kinds.PAGE: lambda: kinds.page(kinds.kept()),
    import_drawing.PAGE: lambda: import_drawing.render(import_drawing.PAGE.read_text()),
}
"""The text that each page has now."""


def _models(_: Sequence[str]) -> int:
    cookbook.write(cookbook.installed())
    recipes.write(recipes.installed())
    return 0


def _architectures(options: Sequence[str]) -> int:
    status = _pytest({figures.VARIABLE: str(figures.FIGURES)}, *FAMILIES, *options)
    figures.write(page.needed(figures.read(), cookbook.listed()))
    return status


def _cookbook(options: Sequence[str]) -> int:
    return _pytest({record.VARIABLE: str(record.KEPT)}, "tests/e2e/cookbook", *options)


def _compatibility(_: Sequence[str]) -> int:
    table.measured()
    return 0


def _agents(_: Sequence[str]) -> int:
    strange = kinds.measured()
    if strange:
        print(f"not in item_kinds.py or block_kinds.py: {strange}", file=sys.stderr)
    return bool(strange)


def _pytest(variables: dict[str, str], *arguments: str) -> int:
    """Run tests, the slow ones, too. Returns pytest's status."""
    env = os.environ | variables | {"SKYRL_TEST_SLOW": "1"}
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=env).returncode


NEW: dict[str, Callable[[Sequence[str]], int]] = {
    "models": _models,
    "architectures": _architectures,
    "cookbook": _cookbook,
    "compatibility": _compatibility,
    "agents": _agents,
}


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] not in NEW:
        raise SystemExit(f"no table is measured as {arguments[0]!r}: {', '.join(NEW)}")
    status = NEW[arguments[0]](arguments[1:]) if arguments else 0
    for file, text in PAGES.items():
        file.write_text(text())
        print(f"wrote {file.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
