"""Compiles the trainer's own Triton kernels for GPUs, without one, and says what the compiler made of them.

Usage: python -m benchmarks.kernel_registers [--capability NUMBER ...] [--out FILE]

Every function of `kernels.triton_kernels` is called once for each model on tensors without memory (torch's device
"meta"). What it would start is recorded, and compiled with Triton and NVIDIA's assembler, which come with the package
triton. The table has the registers of a thread, the bytes that did not fit into registers (spilled: each costs a write
to memory and a read), and the width of the widest reads of memory, of at most 16 bytes.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import program
from benchmarks.table import aligned
from skyrl.trainer.kernels import triton_kernels
from skyrl.trainer.kernels.triton_kernels import IN_TRITON

ROWS = 4096
CAPABILITIES = (80, 90)
"""A100 and H100."""


class Shape(NamedTuple):
    """The widths of a model: of its rows, of its MLP, of a head; its heads of queries and of keys."""

    hidden: int
    mlp: int
    head: int
    queries: int
    keys: int
    norms_heads: bool


SHAPES = {
    "Qwen3-0.6B": Shape(1024, 3072, 128, 16, 8, True),
    "Qwen3-8B": Shape(4096, 12288, 128, 32, 8, True),
    "Qwen2.5-7B": Shape(3584, 18944, 128, 28, 4, False),
    "Llama-3.2-1B": Shape(2048, 8192, 64, 32, 8, False),
    "Qwen2.5-72B": Shape(8192, 29568, 128, 64, 8, False),
}


class Launch(NamedTuple):
    """One start of a kernel. signature: types by argument; constants and attributes as `ASTSource` takes them."""

    function: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    warps: int

    @property
    def key(self) -> str:
        """Equal for launches that Triton compiles once."""
        return repr((self.kernel.__name__, self.signature, self.constants, self.attributes, self.warps))


class Compiled(NamedTuple):
    """`read_bytes`: of the widest read of one thread."""

    registers: int
    spilled_bytes: int
    read_bytes: int


class _Recorder:
    """Takes the place of a kernel, and records its launches under the name of the function that is called."""

    def __init__(self, kernel: Any, found: list[Launch]) -> None:
        self._kernel, self._found = kernel, found
        self.function = ""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._record

    def _record(self, *arguments: Any, num_warps: int, **constants: Any) -> None:
        signature, attributes, fixed = {}, {}, dict(constants)
        for place, (name, value) in enumerate(zip(self._kernel.arg_names, arguments, strict=False)):
            signature[name] = _type(value)
            if self._kernel.params[place].do_not_specialize:
                continue
            if value is None or (isinstance(value, int) and value == 1):
                signature[name], fixed[name] = "constexpr", value
            elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        self._found.append(Launch(self.function, self._kernel, signature, fixed, attributes, num_warps))


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def launches(shape: Shape, rows: int) -> list[Launch]:
    """What one call of each function would start on a GPU; of rotations one for queries and one for keys, and of
    products in groups one with lora_B of rank 8, and one with lora_A of queries, keys and values of rank 32."""
    found: list[Launch] = []
    names = [name for name, value in vars(triton_kernels).items() if isinstance(value, triton.JITFunction)]
    recorders = {name: _Recorder(getattr(triton_kernels, name), found) for name in names if name.endswith("_kernel")}
    with ExitStack() as stack:
        for name, recorder in recorders.items():
            stack.enter_context(patch.object(triton_kernels, name, recorder))
        for function, arguments in _calls(shape, rows):
            for recorder in recorders.values():
                recorder.function = function
            getattr(IN_TRITON, function)(*arguments)
    return found


def _calls(shape: Shape, rows: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    x, weight, rstd = empty(rows, shape.hidden), empty(shape.hidden), empty(rows, dtype=torch.float32)
    yield "rms_norm", (x, weight, 1e-6)
    yield "add_rms_norm", (x, x, weight, 1e-6)
    yield "normed", (x, weight, rstd, 1e-6)
    yield "rms_norm_backward", (x, x, weight, rstd, x)
    for heads in (shape.queries, shape.keys):
        of_heads, angles = empty(rows, heads, shape.head), empty(rows, shape.head)
        scales = empty(shape.head) if shape.norms_heads else None
        kept = empty(rows, heads, dtype=torch.float32) if shape.norms_heads else None
        yield "rotated", (of_heads, scales, 1e-6, angles, angles)
        yield "rotated_backward", (of_heads, of_heads, scales, kept, angles, angles)
    wide = empty(rows, shape.mlp)
    yield "swiglu", (wide, wide)
    yield "swiglu_backward", (wide, wide, wide)
    ends = empty(8, dtype=torch.int32)
    yield "add_grouped", (wide, empty(rows, 8), empty(8, shape.mlp, 8).transpose(1, 2), ends)
    yield "add_grouped", (x, empty(rows, 96), empty(8, 96, shape.hidden), ends)


def compiled(launch: Launch, capability: int) -> Compiled:
    """By Triton and by the ptxas of its package, for a GPU of this compute capability (90: 9.0)."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    found = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": launch.warps})
    ptx = found.asm["ptx"]
    with TemporaryDirectory() as directory:
        file = Path(directory, "kernel.ptx")
        file.write_text(ptx)
        target = re.findall(r"^\.target (sm_\w+)", ptx, re.MULTILINE)[0]
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target}", file, "-o", file.with_suffix(".cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))
    widths = [int(count or 1) * int(bits) // 8 for count, bits in re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", ptx)]
    return Compiled(int(re.findall(r"Used (\d+) registers", said)[0]), spilled, max(widths))


def main() -> None:
    parser = program.parser("kernel_registers", __doc__, out="kernel_registers.json")
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES, help="default: 80 90")
    options = parser.parse_args()
    rows = []
    for model, shape in SHAPES.items():
        for launch in launches(shape, ROWS):
            for capability in options.capability:
                found = compiled(launch, capability)
                rows.append({"model": model, "function": launch.function, "sm": capability, **found._asdict()})
    print(aligned([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))
    program.write(options.out, rows)


if __name__ == "__main__":
    main()
