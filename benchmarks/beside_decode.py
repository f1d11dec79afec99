"""Training beside decoding on one device: the tokens/s of each alone, and of both at the same time.

Usage: python -m benchmarks.beside_decode [--model tiny 0.6b] [--modes plain mps mps-priority] [--seconds S]
                                          [--out FILE]

The decoding process is a stand-in for vLLM (`decode_stand_in`): it is busy as vLLM's decode of 32 sequences is, and
needs neither vLLM nor a network. The training process is the backend on the same model, 32 x 256 tokens. Each process
has its own CUDA context, as vLLM and a trainer have.

Modes: in `plain` the GPU gives the two contexts turns, and kernels of one wait for those of the other. With `mps`
NVIDIA's Multi-Process Service runs kernels of both at the same time; `mps-priority` gives the trainer
CUDA_MPS_CLIENT_PRIORITY=1, below normal: the driver takes it as a hint (docs.nvidia.com/deploy/mps, appendix on tools,
CUDA_MPS_CLIENT_PRIORITY). A stream's priority counts among the streams of one process, and across processes within
MPS alone, so it is no mode of its own. The program starts MPS's daemon in a directory of its own and ends it; it
changes no setting of the GPU. On a CPU the two processes share its cores: a rehearsal of the program, whose figures say
nothing of a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import machine, program
from benchmarks.models import make_large, make_small
from benchmarks.table import aligned, number
from benchmarks.trainer_rows import Shape as Batch
from benchmarks.trainer_rows import TenantPass

_context = multiprocessing.get_context("spawn")  # each process its own CUDA context, after its environment is set
DAEMON = "nvidia-cuda-mps-control"
MODES = ("plain", "mps", "mps-priority")
SEQUENCES = 32
ANSWER_S = 120
"""Longer than a process takes to load its model: where MPS is broken, CUDA may wait for ever."""
RANK = 8


def decoding(model: str) -> Callable[[], int]:
    """Makes the stand-in; the result makes a step, and returns its tokens."""
    from benchmarks.decode_stand_in import Decode

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    return Decode(model, torch.device("cuda" if on_gpu else "cpu"), sequences=SEQUENCES, context=_length(1024)).step


def training(model: str) -> Callable[[], int]:
    """Makes a backend; the result makes a step of a pass and the optimizer, and returns its tokens."""
    from benchmarks.models import Shape
    from benchmarks.trainer_ways import SkyrlWay

    shape = Batch(1, SEQUENCES, (0, 0), (_length(256), _length(256)))
    each = TenantPass(RANK, shape.loss_fn, shape.data(Shape(Path(model)).vocabulary, 0))
    way = SkyrlWay(model, 1, merge=False, config={"trainer.micro_batch_tokens": 8192})
    way.start([each])

    def step() -> int:
        way.step()
        return each.tokens

    return step


def _length(tokens: int) -> int:
    """An eighth in a rehearsal."""
    return tokens if torch.cuda.is_available() else tokens // 8


WORK = {"decoding": decoding, "training": training}


def _serve(connection: Any, work: str, model: str, environment: dict[str, str]) -> None:
    """At each number of seconds that comes: work until the next message, and send the tokens/s of the first steps that
    have taken so long."""
    os.environ.update(environment)
    try:
        step = WORK[work](model)
        for _ in range(2):
            step()
        connection.send(None)
        while (seconds := connection.recv()) is not None:
            tokens, started, told = 0, time.perf_counter(), False
            while not connection.poll():
                tokens += step()
                taken = time.perf_counter() - started
                if taken >= seconds and not told:
                    connection.send(tokens / taken)
                    told = True
            connection.recv()
    except EOFError:
        return  # the program has ended
    except Exception as error:  # of torch's and CUDA's many kinds
        connection.send(RuntimeError(f"{work}: {type(error).__name__}: {error}"))


class Worker:
    """A process that decodes or trains when it is told to. Raises RuntimeError for an error there."""

    def __init__(self, work: str, model: str, environment: dict[str, str]) -> None:
        self._connection, other = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(other, work, model, environment), daemon=True)
        self._process.start()
        other.close()

    def ready(self) -> None:
        """Wait until it has made its first steps."""
        self._answer()

    def begin(self, seconds: float) -> None:
        self._connection.send(seconds)

    def rate(self, seconds: float) -> float:
        """Tokens/s since `begin`. It goes on working until `end`."""
        return self._answer(seconds)

    def end(self) -> None:
        self._connection.send("end")

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send(None)
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
        self._connection.close()

    def _answer(self, seconds: float = 0) -> Any:
        if not self._connection.poll(seconds + ANSWER_S):
            raise RuntimeError(f"the process has not answered for {seconds + ANSWER_S:.0f} s")
        try:
            found = self._connection.recv()
        except EOFError:
            raise RuntimeError("the process has ended; was it killed for its memory?") from None
        if isinstance(found, Exception):
            raise found
        return found


def together(workers: Sequence[Worker], seconds: float) -> list[float]:
    """The tokens/s of each while all of them work."""
    for worker in workers:
        worker.begin(seconds)
    rates = [worker.rate(seconds) for worker in workers]
    for worker in workers:
        worker.end()
    return rates


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Inside, MPS's daemon runs; the environment of its clients. Raises RuntimeError if it does not start."""
    if shutil.which(DAEMON) is None:
        raise RuntimeError(f"{DAEMON} is not installed")
    with TemporaryDirectory(prefix="skyrl-mps-") as directory:
        own = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        given = {"env": os.environ | own, "capture_output": True, "text": True, "timeout": 30, "check": False}
        started = subprocess.run([DAEMON, "-d"], **given)
        if started.returncode:
            raise RuntimeError(f"{DAEMON} did not start: {started.stderr.strip() or started.stdout.strip()}")
        try:
            yield own
        finally:
            subprocess.run([DAEMON], input="quit\n", **given)


def measure(model: str, mode: str, seconds: float) -> dict[str, float]:
    """Tokens/s of `decoding` and `training`, each alone and beside the other. Raises RuntimeError where a mode cannot
    run."""
    with ExitStack() as stack:
        environment = {} if mode == "plain" else stack.enter_context(mps())
        of_trainer = environment | ({"CUDA_MPS_CLIENT_PRIORITY": "1"} if mode == "mps-priority" else {})
        workers: list[Worker] = []
        for work, given in (("decoding", environment), ("training", of_trainer)):
            worker = Worker(work, model, given)
            stack.callback(worker.close)
            workers.append(worker)
        for worker in workers:
            worker.ready()
        alone = [together([worker], seconds)[0] for worker in workers]
        beside = together(workers, seconds)
    return {
        "decoding_alone": alone[0],
        "training_alone": alone[1],
        "decoding_beside": beside[0],
        "training_beside": beside[1],
    }


def table(found: dict[str, dict[str, float] | str]) -> str:
    lines = [["mode", "decoding: alone", "beside", "part", "training: alone", "beside", "part"]]
    for mode, rates in found.items():
        if isinstance(rates, str):
            lines.append([f"{mode}: {rates}", *[""] * 6])
            continue
        cells: list[float] = []
        for work in WORK:
            alone, beside = rates[f"{work}_alone"], rates[f"{work}_beside"]
            cells += [alone, beside, beside / alone]
        lines.append([mode, *map(number, cells)])
    return aligned(lines)


def main() -> None:
    parser = program.parser("beside_decode", __doc__, out="beside-decode.json")
    default = "0.6b" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--model", choices=("tiny", "0.6b"), default=default, help=f"default here: {default}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["plain"], metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")
    options = parser.parse_args()
    facts = machine.facts() | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    found: dict[str, dict[str, float] | str] = {}
    with TemporaryDirectory(prefix="skyrl-beside-decode-") as directory:
        path = Path(directory) / options.model
        model = make_large(path) if options.model == "0.6b" else make_small(path, 2)
        for mode in options.modes:
            try:
                found[mode] = measure(model, mode, options.seconds)
            except RuntimeError as error:
                found[mode] = str(error)
    print(table(found))
    program.write(options.out, {"facts": facts, "model": options.model, "results": found})


if __name__ == "__main__":
    main()
