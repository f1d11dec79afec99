"""Write docs/reference/architectures.md and parsers.md: `python -m tests.architectures [--measure [-k EXPRESSION]]`.

The cookbook's models come from the release that `requirements/cookbook.txt` pins. `--measure` first runs the tests
whose figures the page shows, also the slow ones with vLLM; further options go to pytest, so that a few families can be
measured anew.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.architectures import cookbook, figures, parsers_page
from tests.architectures.page import PAGE, needed, render
from tests.environments import ROOT

MEASURING = (
    "tests/unit/training/test_torch_lora_families.py",
    "tests/unit/training/test_mixture_families.py",
    "tests/unit/training/test_torch_lora_refusals.py",
    "tests/component/inference/test_families_vllm.py",
)


def measure(options: list[str]) -> int:
    """Run the tests with these options of pytest. Returns pytest's status."""
    env = os.environ | {figures.VARIABLE: str(figures.FIGURES), "SKYRL_TEST_SLOW": "1"}
    return subprocess.run([sys.executable, "-m", "pytest", *MEASURING, *options], cwd=ROOT, env=env).returncode


def main(arguments: list[str]) -> int:
    status = measure(arguments[1:]) if arguments[:1] == ["--measure"] else 0
    listed = cookbook.installed()
    kept = needed(figures.read(), listed)
    figures.write(kept)
    cookbook.write(listed)
    PAGE.write_text(render(kept, listed))
    parsers_page.PAGE.write_text(parsers_page.render())
    print(f"wrote {PAGE.relative_to(ROOT)} and {parsers_page.PAGE.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
