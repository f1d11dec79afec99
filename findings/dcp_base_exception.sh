#!/usr/bin/env bash
# A failed load or save of torch's distributed checkpoints is no Exception: `except Exception` lets it through.
#
# Guess:    loading a key that a checkpoint lacks raises an Exception, as torch.load and load_state_dict do.
# Seen:     CheckpointException derives from BaseException alone. A handler that keeps a trainer alive does not see it; the
#           process ends as by a KeyboardInterrupt.
# Version:  torch 2.13.0.
# Source:   torch/distributed/checkpoint/api.py: "class CheckpointException(BaseException)".
# Cost:     a training service that catches Exception to answer one tenant ends for all tenants.
# skyrl:    writes and reads its own safetensors files, and no distributed checkpoints.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5
"$work/env/bin/python" -W ignore - "$work/checkpoint" <<'PY'
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

dcp.save({"weight": torch.zeros(4)}, checkpoint_id=sys.argv[1])
try:
    dcp.load({"bias": torch.zeros(4)}, checkpoint_id=sys.argv[1])
    seen = "nothing"
except Exception as error:
    seen = f"Exception: {type(error).__name__}"
except BaseException as error:
    seen = f"BaseException: {type(error).__name__}"
print(f"a key that the checkpoint lacks: {seen}")
print("bases:", " > ".join(each.__name__ for each in CheckpointException.__mro__))
assert seen == "BaseException: CheckpointException", "changed: what a failed load raises"
print("as written: except Exception does not catch it")
PY
