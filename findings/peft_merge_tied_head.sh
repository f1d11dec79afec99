#!/usr/bin/env bash
# PEFT merges an adapter on lm_head into the embeddings, too, where the two are tied: the merged model is another model.
#
# Guess:    merge_and_unload gives a model with the same logits as base and adapter together, to rounding.
# Seen:     with tie_word_embeddings the logits differ by more than 1: the merged lm_head is still the embeddings' tensor, so
#           the adapter's product changes every input as well. It warns of "complications", and raises nothing.
# Version:  peft 0.21.2, transformers 5.19.0, torch 2.13.0.
# Source:   peft/tuners/tuners_utils.py, the two warnings about tie_word_embeddings; the merge changes the weight in place.
# Cost:     a trained adapter of a small Qwen, Llama or Gemma is right in training and wrong after its export.
# skyrl:    `skyrl adapter merge` unties the two, or refuses (docs/how-it-works/checkpoints.md).
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.3.5 transformers==5.19.0 peft==0.21.2 accelerate==1.15.0
TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$work/env/bin/python" -W ignore - <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def difference(tied):
    """Of the logits after merging, from those before."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=tied, **shape)
    model = get_peft_model(LlamaForCausalLM(config).eval(), LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1)
        tokens = torch.arange(8)[None]
        before = model(tokens).logits
        merged = model.merge_and_unload()
        shared = merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
        return float((merged(tokens).logits - before).abs().max()), shared


for tied in (False, True):
    print("tied" if tied else "not tied", "logits differ by %.2g, one tensor: %s" % difference(tied))
assert difference(False)[0] < 1e-5
found, shared = difference(True)
assert shared and found > 0.5, "changed: a tied head is merged right"
print("as written: a tied head is merged into the embeddings")
PY
