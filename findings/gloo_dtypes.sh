#!/usr/bin/env bash
# torch's gloo broadcasts int8 and bfloat16, and refuses float8, int16 and the unsigned integers above 8 bits.
#
# Guess:    a broadcast copies bytes, so every dtype of a weight goes through.
# Seen:     float8_e4m3fn, float8_e5m2, int16, uint16, uint32 and uint64 raise RuntimeError "Invalid scalar type".
# Version:  torch 2.13.0, one process.
# Source:   torch/csrc/distributed/c10d, the macro GENERATE_ALL_TYPES of the gloo process group: the types that it lists.
# Cost:     a trainer that broadcasts a quantized release to inference servers fails at its first scale or packed weight.
# skyrl:    sends the bytes of such tensors as uint8 (skyrl.weights).
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5
"$work/env/bin/python" - "$work/store" <<'PY'
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
taken = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]
refused = ["float8_e4m3fn", "float8_e5m2", "int16", "uint16", "uint32", "uint64"]
for name in (*taken, *refused):
    try:
        dist.broadcast(torch.zeros(4, dtype=getattr(torch, name)), 0)
        seen = "broadcast"
    except RuntimeError as error:
        seen = f"RuntimeError: {error}".split("\n")[0]
    print(f"{name}: {seen}")
    assert (seen == "broadcast") == (name in taken), f"changed: {name}"
dist.destroy_process_group()
print("as written: float8, int16 and wide unsigned integers are refused")
PY
