#!/usr/bin/env bash
# A Datum of the Tinker SDK keeps the caller's array: what is written into it later is what is sent.
#
# Guess:    types.Datum copies numbers at its creation, as its lists of tokens are copied.
# Seen:     an array that is reused for the next Datum changes the first one, too, until forward_backward has encoded it.
# Version:  tinker 0.38.0.
# Source:   tinker/types/tensor_data.py: "arr = data" for a writable array of the right dtype.
# Cost:     a loop that fills one buffer of advantages for many sequences trains all of them with the last one's numbers.
# skyrl:    gets what was encoded, and cannot see it.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check tinker==0.38.0 numpy==2.3.5
"$work/env/bin/python" - <<'PY'
import numpy as np
from tinker import types

buffer = np.zeros(3, np.float32)
tokens = [1, 2, 3]
first = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"advantages": buffer})
buffer[:] = 7
tokens[0] = 9
print("advantages:", list(first.loss_fn_inputs["advantages"].data))
print("tokens:", first.model_input.to_ints())
assert list(first.loss_fn_inputs["advantages"].data) == [7, 7, 7], "changed: a Datum copies arrays"
assert first.model_input.to_ints() == [1, 2, 3], "changed: a Datum keeps the caller's list of tokens"
print("as written: arrays are kept, tokens are copied")
PY
