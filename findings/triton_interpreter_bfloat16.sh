#!/usr/bin/env bash
# Triton's interpreter cuts float32 off where a kernel stores bfloat16; a GPU rounds to the nearest.
#
# Guess:    TRITON_INTERPRET=1 runs a kernel with the numbers of a GPU, so a test without one compares with torch's.
# Seen:     a store of float32 into a bfloat16 tensor drops the low 16 bits: 1.01171875 becomes 1.0078125, and torch's
#           rounding gives 1.015625. So do tl.cast with fp_downcast_rounding="rtne", and .to(tl.bfloat16).
# Version:  triton 3.7.1, torch 2.13.0 on the CPU.
# Source:   triton/runtime/interpreter.py, _convert_float.
# Cost:     errors that a kernel has in bfloat16 look twice as large as on a GPU, all in one direction: a right kernel
#           fails its test, or a tolerance that lets it pass hides a wrong one.
# skyrl:    its tests of kernels put torch's rounding into the interpreter.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5
"$work/env/bin/pip" install --quiet --disable-pip-version-check --no-deps triton==3.7.1
cat > "$work/kernel.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def store(source, stored, cast, rounded, n: tl.constexpr):
    place = tl.arange(0, n)
    values = tl.load(source + place)
    tl.store(stored + place, values)
    tl.store(cast + place, values.to(tl.bfloat16))
    tl.store(rounded + place, tl.cast(values, tl.bfloat16, fp_downcast_rounding="rtne"))


source = torch.tensor([1.01171875, -1.01171875, 1.005, 3.3])
ways = {name: torch.empty(4, dtype=torch.bfloat16) for name in ("store", ".to", "tl.cast with rtne")}
store[(1,)](source, *ways.values(), n=4)
cut = (source.view(torch.int32) & -0x10000).view(torch.float32)
print("float32:          ", source.tolist())
print("torch.bfloat16:   ", source.bfloat16().tolist())
for name, found in ways.items():
    print(f"{name + ':':18}", found.tolist())
    assert torch.equal(found.float(), cut), f"changed: {name} does not cut off"
assert not torch.equal(cut, source.bfloat16().float())
print("as written: the interpreter cuts off")
PY
TRITON_INTERPRET=1 "$work/env/bin/python" "$work/kernel.py"
