"""Reading safetensors files without a map into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl.inference.vllm_plugin.weights.checkpoint import entries, tensors
from skyrl.inference.vllm_plugin.weights.jobs import WeightsError
from skyrl.weights.tensors import FLOATS, INTEGERS

KINDS = {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    **{str(dtype): torch.tensor([0.5, 1, 2, 4]).to(dtype) for dtype in FLOATS + INTEGERS},
}


def never() -> bool:
    return False


def written(path: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def test_every_kind_of_tensor_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_file(KINDS, tmp_path / "model.safetensors")
    read = dict(tensors(entries(tmp_path), never, torch.empty))
    assert read.keys() == KINDS.keys()
    for name, tensor in KINDS.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert read[name].to(torch.float32).tolist() == tensor.to(torch.float32).tolist()


def test_an_index_decides_which_files_are_read(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_file({f"t{number}": torch.full((2,), float(number))}, tmp_path / f"{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t1": "1.safetensors", "t3": "3.safetensors"}}))
    assert sorted(entries(tmp_path)) == ["t1", "t3"]
    index.write_text(json.dumps({"weight_map": {"t9": "9.safetensors"}}))
    with pytest.raises(WeightsError, match=r"9\.safetensors is missing"):
        entries(tmp_path)
    index.write_text(json.dumps({"weight_map": {"t1": "../1.safetensors"}}))
    with pytest.raises(WeightsError, match="outside its directory"):
        entries(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="is not an index"):
        entries(tmp_path)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "is not a safetensors file"),
        (b"{", "is not a safetensors file"),
        (b"[" * 100_000, "is not a safetensors file"),
        ({"t": 1}, "is not a safetensors file"),
        (entry(offsets=(0,)), "is not a safetensors file"),
        (entry(offsets=(0.0, 8.0)), "is not a safetensors file"),
        (entry(shape=(2.0,)), "is not a safetensors file"),
        (entry(shape=(-1, -2)), "does not fit"),
        (entry(offsets=(0, 4)), "does not fit"),
        (entry(offsets=(-8, 0)), "does not fit"),
        (entry(shape=(3,), offsets=(0, 12)), "is cut off"),
        (entry(dtype="F4"), "dtype F4, which is not offered"),
    ],
)
def test_a_wrong_header_is_refused(header: object, message: str, tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(WeightsError, match=message):
        entries(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", (1 << 40).to_bytes(8, "little"), bytes(8)])
def test_a_file_without_a_header_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="not a safetensors file, or it is cut off"):
        entries(tmp_path)


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")  # to open it would block
    with pytest.raises(WeightsError, match="has no safetensors files"):
        entries(tmp_path)
    with pytest.raises(WeightsError, match="is not a directory"):
        entries(tmp_path / "none")


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"t": torch.zeros(2)}, tmp_path / f"{number}.safetensors")
    with pytest.raises(WeightsError, match=r"2\.safetensors: t is also in 1\.safetensors"):
        entries(tmp_path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [(lambda path: os.truncate(path, path.stat().st_size - 4), "became shorter"), (os.remove, "No such file")],
)
def test_a_file_that_changes_while_it_is_read_is_an_error(
    harm: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.zeros(4)}, path)
    found = entries(tmp_path)
    harm(path)
    with pytest.raises(WeightsError, match=message):
        list(tensors(found, never, torch.empty))


def test_reading_ends_once_it_is_stopped(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "model.safetensors")
    answers = iter([False, True])
    assert len(list(tensors(entries(tmp_path), lambda: next(answers), torch.empty))) == 1
