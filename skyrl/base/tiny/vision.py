"""Make a tiny model that sees from the checked-in model: `python -m skyrl.base.tiny.vision --out DIR`.

The language model of this Qwen3-VL has the weights of the tiny model, so it answers text as the tiny model does. Its
vision tower is random: colours and shapes reach the language model as features that adapters can learn to name, and
nothing more. Four tokens are new. Nothing is trained: it takes a second, and no weights are checked in.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLVideoProcessor,
)

from skyrl.base.tiny import model_path

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The new tokens, as Qwen3-VL names them. They follow the tiny model's vocabulary."""
NEVER_SAID = "<think>"
"""A token that the tiny model never answers with. The new tokens get its rows, so it does not answer with them."""
VOCABULARY_MULTIPLE = 64
PATCH, MERGE = 16, 2
LEAST_PIXELS, MOST_PIXELS = 4 * (PATCH * MERGE) ** 2, 64 * (PATCH * MERGE) ** 2
"""A picture takes 4 to 64 tokens."""
DEPTH, VISION_HIDDEN, VISION_HEADS = 2, 64, 2
TOWER_STD = 0.15
"""Standard deviation of the tower's random weights."""
OUTPUT_STD = {"merger.linear_fc2.weight": 0.003, "deepstack_merger_list.0.linear_fc2.weight": 0.04}
"""That of the weights that give a picture's embeddings, and what a deepstack layer adds to the first layer's output:
then both are about as large as they are for tokens."""
SEED = 22
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] in ('image', 'image_url') %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'text' %}{{- part['text'] }}"
    "{%- else %}{{- raise_exception('this model takes text and images') }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make(out: Path) -> None:
    """Write the model (3 layers, a tower of 2 layers with one deepstack layer, 0.9 M parameters, bfloat16), its
    tokenizer and its processor into `out`."""
    dense: Any = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    size = _write_tokenizer(out, dense.config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids: dict[str, int] = dict(zip(TOKENS, tokenizer.convert_tokens_to_ids(list(TOKENS)), strict=True))
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = Qwen3VLForConditionalGeneration(_config(dense.config, size, ids))
        for name, tensor in model.model.visual.named_parameters():
            if name.endswith("weight") and tensor.ndim > 1:
                torch.nn.init.normal_(tensor, std=OUTPUT_STD.get(name, TOWER_STD))
    weights = {_renamed(name): tensor for name, tensor in dense.state_dict().items()}
    never_said = tokenizer.convert_tokens_to_ids(NEVER_SAID)
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = _with_rows(weights[name], size, never_said)
    tower = {f"model.visual.{name}": tensor for name, tensor in model.model.visual.state_dict().items()}
    model.load_state_dict(tower | weights)
    model.generation_config = dense.generation_config
    model.bfloat16().save_pretrained(out)
    sizes: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    Qwen2VLImageProcessor(**sizes).save_pretrained(out)
    Qwen3VLVideoProcessor(**sizes).save_pretrained(out)


def _write_tokenizer(out: Path, first: int) -> int:
    """Write the tiny tokenizer with TOKENS added from id `first` on. Returns the size of the vocabulary, rounded up."""
    shutil.copyfile(model_path() / "tokenizer.json", out / "tokenizer.json")
    layout = json.loads((out / "tokenizer.json").read_text("utf-8"))
    added = layout["added_tokens"]
    for number, text in enumerate(TOKENS, first):
        added.append({**added[0], "id": number, "content": text, "special": True})
    (out / "tokenizer.json").write_text(json.dumps(layout, indent=1, ensure_ascii=False) + "\n", "utf-8")
    settings = json.loads((model_path() / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] += TOKENS
    settings["processor_class"] = "Qwen3VLProcessor"
    del settings["chat_template"]  # transformers' processors read the file alone, its tokenizers either
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return -(-(first + len(TOKENS)) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _config(dense: Any, vocabulary: int, ids: dict[str, int]) -> Qwen3VLConfig:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": dense.hidden_size,
        "intermediate_size": dense.intermediate_size,
        "num_hidden_layers": dense.num_hidden_layers,
        "num_attention_heads": dense.num_attention_heads,
        "num_key_value_heads": dense.num_key_value_heads,
        "head_dim": dense.head_dim,
        "max_position_embeddings": dense.max_position_embeddings,
        "rms_norm_eps": dense.rms_norm_eps,
        # Text positions are the same in all three parts, and then M-RoPE is the tiny model's RoPE.
        "rope_parameters": {**dense.rope_parameters, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
        "bos_token_id": None,
        "eos_token_id": dense.eos_token_id,
        "pad_token_id": dense.pad_token_id,
    }
    vision = {
        "depth": DEPTH,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_heads": VISION_HEADS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": dense.hidden_size,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )


def _renamed(name: str) -> str:
    """The name of a tensor of the tiny model in a Qwen3-VL."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _with_rows(weight: Tensor, rows: int, copied: int) -> Tensor:
    """float [rows, columns]: the weight, then copies of its row `copied`."""
    return torch.cat([weight, weight[copied].expand(rows - len(weight), -1)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model that sees.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    make(out)


if __name__ == "__main__":
    main()
