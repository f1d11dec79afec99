"""A base model of the model hub is found in the hub's cache, also by a process that has loaded none of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from skyrl.inference.remote.references import base_directory
from skyrl.trainer.files.model_files import files_beside_weights

NAME = "maker/model"
WEIGHTS = {"config.json", "model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What vLLM and transformers leave in the cache: a list of the repository's files, and not all of them."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--maker--model"
    directory = repository / "snapshots" / "c0"
    directory.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0")
    for name in WEIGHTS | TOKENIZER:
        (directory / name).write_text("{}")
    listed = {name: {"size": 2, "blob_id": "0"} for name in WEIGHTS | TOKENIZER | {"README.md"}}
    (repository / "trees").mkdir()
    (repository / "trees" / "c0.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    files_beside_weights.cache_clear()
    return directory


def test_a_cached_model_is_found_without_its_readme(snapshot: Path) -> None:
    assert base_directory(NAME) == snapshot


def test_a_name_stays_a_name_while_the_models_weights_are_not_there(snapshot: Path) -> None:
    assert base_directory("maker/other") == Path("maker/other")
    (snapshot / "model.safetensors").unlink()
    assert base_directory(NAME) == Path(NAME)


def test_a_tokenizer_is_found_in_the_cache(snapshot: Path) -> None:
    assert set(files_beside_weights(NAME)) == {snapshot / name for name in TOKENIZER}
    assert files_beside_weights("maker/other") == ()
