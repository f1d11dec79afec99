"""The small services in examples/cookbook answer as those that they stand in for."""

from __future__ import annotations

import base64
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.environments import ROOT


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, ROOT / "examples" / "cookbook" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look there
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sandbox() -> ModuleType:
    return load("sandbox")


@pytest.fixture(scope="module")
def embeddings() -> ModuleType:
    return load("embeddings")


def asked(
    code: str, timeout_s: float = 20, language: str = "python", files: dict[str, str] | None = None
) -> dict[str, Any]:
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in (files or {}).items()}
    return {"code": code, "language": language, "run_timeout": timeout_s, "files": encoded}


def test_a_program_that_ends_well_is_a_success_and_reads_its_files(sandbox: ModuleType) -> None:
    said = sandbox.answer(asked("print(open('text').read())", files={"text": "hello"}))
    assert said["status"] == "Success"
    assert said["run_result"]["stdout"] == "hello\n"


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(3)", "bytearray(8 * 2**30)", "open('f', 'wb').write(b'x' * 2**26)"]
)
def test_a_program_that_fails_or_passes_a_limit_is_no_success(sandbox: ModuleType, code: str) -> None:
    said = sandbox.answer(asked(code))
    assert said["status"] == "Failed"
    assert said["run_result"]["return_code"] != 0


def test_a_program_that_does_not_end_is_ended_with_what_it_started(sandbox: ModuleType, tmp_path: Path) -> None:
    later = f"import time; time.sleep(2); open({str(tmp_path / 'late')!r}, 'w')"
    said = sandbox.answer(asked(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {later!r}])", 1))
    assert (said["status"], said["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert not (tmp_path / "late").exists()


def test_a_file_outside_the_programs_directory_is_refused(sandbox: ModuleType, tmp_path: Path) -> None:
    said = sandbox.answer(asked("", files={"../outside": "x"}))
    assert said["status"] == "SandboxError"
    assert "outside" in said["message"]


def test_another_language_is_refused(sandbox: ModuleType) -> None:
    assert sandbox.answer(asked("", language="cpp"))["status"] == "SandboxError"


def test_texts_with_common_words_are_near_each_other(embeddings: ModuleType) -> None:
    requests = [
        {"content": {"parts": [{"text": text}]}, "embedContentConfig": {"outputDimensionality": 64}}
        for text in ("What colour is the fox?", "The fox is red.", "Rain before noon")
    ]
    query, near, far = (each["values"] for each in embeddings.answer({"requests": requests})["embeddings"])
    assert len(query) == 64
    assert math.hypot(*query) == pytest.approx(1)
    assert math.dist(query, near) < math.dist(query, far)
