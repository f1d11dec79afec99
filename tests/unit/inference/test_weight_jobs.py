"""What a vLLM worker does beside its engine: jobs in threads, calls over its line, and checkpoints that it reads."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl.inference.sidecar.vllm_weights import LinesBroken, ask_all
from skyrl.inference.vllm_plugin.weights.checkpoint import entries, tensors
from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs, WeightsError
from skyrl.inference.vllm_plugin.weights.line import Line
from skyrl.weights.tensors import FLOATS, INTEGERS


def ended(jobs: Jobs) -> None:
    """Wait for the threads of all jobs."""
    for thread in threading.enumerate():
        if thread.name.startswith("skyrl "):
            thread.join(10)


def test_one_job_at_a_time() -> None:
    jobs, go = Jobs(), threading.Event()

    def work(job: Job) -> dict[str, Any]:
        assert go.wait(10)
        return {"stopped": job.stopped()}

    number = jobs.start("reading", work)
    assert jobs.state(number) == {"running": True}
    with pytest.raises(WeightsError, match="reading still runs") as raised:
        jobs.start("another", work)
    assert raised.value.status == 409
    jobs.stop()
    go.set()
    ended(jobs)
    assert jobs.state(number) == {"running": False, "stopped": True}
    assert jobs.start("another", work) == number + 1
    with pytest.raises(WeightsError, match="there is no job 1"):
        jobs.state(number)
    ended(jobs)


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (WeightsError("no", 501), "no", 501),
        (MemoryError(), "reading: MemoryError", 500),
        (RuntimeError("bad"), "reading: bad", 500),
    ],
)
def test_each_question_for_a_failed_job_tells_its_error(error: Exception, message: str, status: int) -> None:
    jobs = Jobs()

    def work(_: Job) -> dict[str, Any]:
        raise error

    number = jobs.start("reading", work)
    ended(jobs)
    for _ in range(2):
        with pytest.raises(WeightsError, match=f"^{message}$") as raised:
            jobs.state(number)
        assert raised.value.status == status


class Large:
    """Stands for staged tensors."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_has_ended_holds_nothing_of_its_work(fails: bool) -> None:
    jobs = Jobs()

    def start() -> tuple[int, weakref.ref[Large]]:
        captured = Large()

        def work(_: Job) -> dict[str, Any]:
            local = captured
            if fails:
                raise WeightsError("no")
            return {"kind": type(local).__name__}

        return jobs.start("reading", work), weakref.ref(captured)

    number, large = start()
    ended(jobs)
    if fails:
        with pytest.raises(WeightsError):
            jobs.state(number)
    gc.collect()
    assert large() is None


def echo(call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ok": True, "call": call, **arguments}


@pytest.fixture
def line() -> Iterator[Line]:
    opened = Line(echo)
    yield opened
    opened.close()


async def test_each_worker_answers(line: Line) -> None:
    names = [f"model.layers.{number}.weight" for number in range(20_000)]
    answers = await ask_all((line.address, line.address), "receive", {"names": names}, 10)
    assert answers == [{"ok": True, "call": "receive", "names": names}] * 2


@pytest.mark.parametrize("call", ["apply", "reset_tensors", "weight"])
async def test_a_call_that_the_engine_must_not_run_beside_is_refused(call: str, line: Line) -> None:
    with pytest.raises(LinesBroken):
        await ask_all((line.address,), call, {}, 10)


async def test_a_worker_that_is_gone_is_told_from_one_that_is_slow(line: Line) -> None:
    with pytest.raises(LinesBroken, match="refused"):
        await ask_all((line.address, "skyrl-weights-gone"), "state", {}, 10)
    slow = Line(lambda call, arguments: time.sleep(5) or {})
    with pytest.raises(TimeoutError):
        await ask_all((slow.address,), "state", {}, 0.2)
    slow.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can become another user")
def test_another_user_gets_no_answer(line: Line) -> None:
    child = os.fork()
    if child == 0:
        os.seteuid(12345)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(f"\0{line.address}")
            asking.settimeout(5)
            try:
                asking.sendall(b'{"call": "state", "arguments": {}}\n')
                os._exit(len(asking.recv(10)))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_a_question_for_a_job_waits_for_its_end() -> None:
    jobs, go = Jobs(), threading.Event()

    def work(_: Job) -> dict[str, Any]:
        go.wait(10)
        return {"done": 1}

    number = jobs.start("work", work)
    line = Line(lambda call, arguments: jobs.state(**arguments))
    assert await ask_all((line.address,), "job", {"number": number, "wait_s": 0.05}, 10) == [{"running": True}]
    asked = asyncio.ensure_future(ask_all((line.address,), "job", {"number": number, "wait_s": 10}, 20))
    await asyncio.sleep(0.05)
    go.set()
    assert await asked == [{"running": False, "done": 1}]
    line.close()


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
