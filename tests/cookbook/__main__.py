"""Write the made part of docs/cookbook.md: `python -m tests.cookbook [--run [-k EXPRESSION]]`.

`--run` first runs the cookbook's tests, also the slow ones, and keeps what each run showed; further options go to
pytest, so that a few recipes can be run anew.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.cookbook import recipes, record
from tests.cookbook.page import PAGE, render
from tests.environments import ROOT


def run(options: list[str]) -> int:
    """Run the tests with these options of pytest. Returns pytest's status."""
    env = os.environ | {record.VARIABLE: str(record.KEPT), "SKYRL_TEST_SLOW": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests/e2e/cookbook", *options], cwd=ROOT, env=env
    ).returncode


def main(arguments: list[str]) -> int:
    status = run(arguments[1:]) if arguments[:1] == ["--run"] else 0
    listed = recipes.installed()
    recipes.write(listed)
    PAGE.write_text(render(PAGE.read_text(), record.read(), listed, recipes.NEEDS))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
