"""Traps of released tokenizers: a sentence before the start for each, and none for a tokenizer that is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.cli.launcher import preflight
from skyrl.cli.launcher import preflight as tokenizer_notes
from skyrl.cli.launcher.preflight import notes_on
from skyrl.trainer.tools.tokenizer_readings import TEXT, difference


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_path(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def _change(file: Path, **values: Any) -> None:
    kept = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))


def _add_tokens(model: Path, count: int) -> None:
    file = model / "tokenizer.json"
    held = json.loads(file.read_text())
    like = held["added_tokens"][0]
    held["added_tokens"] += [{**like, "id": 512 + number, "content": f"<beyond{number}>"} for number in range(count)]
    file.write_text(json.dumps(held))


def test_a_right_tokenizer_has_no_notes(model: Path) -> None:
    assert list(notes_on(str(model))) == []
    (model / "tokenizer.json").unlink()
    assert list(notes_on(str(model))) == []


def test_tokens_beyond_the_rows_are_counted(model: Path) -> None:
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    assert rows == 512
    _add_tokens(model, 1)
    (note,) = notes_on(str(model))
    assert "has 1 token beyond the model's 512 rows (512, '<beyond0>'): requests that hold one are refused" in note
    _add_tokens(model, 3)
    (note,) = notes_on(str(model))
    assert "has 3 tokens beyond" in note
    _change(model / "config.json", vision_config={})  # placeholders of pictures have no rows
    assert list(notes_on(str(model))) == []


def test_a_class_with_which_transformers_reads_another_tokenizer_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change(model / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    broken: Any = AutoTokenizer.from_pretrained(model)
    found = difference(str(model))
    assert found is not None
    assert broken.decode(broken.encode("The old fox")) != "The old fox"
    assert found.startswith(f"{TEXT!r} is decoded as ")
    monkeypatch.setattr(tokenizer_notes, "_read_otherwise", difference)  # in this process
    (note,) = notes_on(str(model))
    assert "says tokenizer_class: LlamaTokenizerFast" in note
    assert note.endswith('set tokenizer_class to "PreTrainedTokenizerFast" there')
    _change(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert difference(str(model)) is None
    assert list(notes_on(str(model))) == []


def test_transformers_warning_of_mistrals_pattern_is_explained_where_it_comes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_notes, "_LARGE", 100)
    assert list(notes_on(str(model))) == [], "config.json has a transformers_version"
    _change(model / "config.json", transformers_version=None)
    (note,) = notes_on(str(model))
    assert 'transformers may warn of "an incorrect regex pattern"' in note
    _change(model / "config.json", model_type="mistral")
    assert list(notes_on(str(model))) == [], "there the warning is right"


def test_the_start_logs_them(model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(model_path() / "model.safetensors", model)
    _add_tokens(model, 1)
    monkeypatch.setattr(preflight, "check_vllm", lambda **_: True)
    preflight.check(load_config({"base_model": str(model)}, None))
    assert [record.levelname for record in caplog.records if "beyond the model's 512 rows" in record.message] == [
        "WARNING"
    ]
