"""Train the tiny model and its tokenizer from synthetic text: `python -m skyrl.base.tiny.make [--out DIR]`.

The run uses one thread and fixed seeds, so on one machine it writes the same bytes each time. With another processor or
PyTorch version the last bits may differ. The model learns from teachers that make mistakes: it then knows both tasks,
but makes mistakes that reinforcement learning can remove.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from skyrl.base.tiny import corpus, model_path

VOCAB = 512
CONTROL = (corpus.END_OF_TEXT, corpus.IM_START, corpus.IM_END)
SPECIALS = (*CONTROL, "<think>", "</think>")
# A word includes its leading space. Each digit is one piece, and so are the marks between two letters.
PIECES = r"\p{N}| ?\p{L}+|\s*[\r\n]+| ?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
STEPS, ROWS, LENGTH = 450, 16, 128
PEAK_LR = 8e-3
SEED = 20
IGNORE = -100


def sample(rng: Random) -> tuple[str, str]:
    """One training text as (context, target). The loss covers only the target."""
    draw = rng.random()
    if draw < 0.12:
        return corpus.END_OF_TEXT, corpus.paragraph(rng, rng.randint(1, 4)) + corpus.END_OF_TEXT
    if draw < 0.2:
        question, reply = corpus.small_talk(rng)
        return corpus.IM_START, corpus.chat_prompt(question)[len(corpus.IM_START) :] + reply + corpus.IM_END
    task = corpus.TASKS["count" if draw < 0.5 else "sort"]
    question, state = task.prompt(rng)
    return corpus.chat_prompt(question), task.sloppy(rng, state) + corpus.IM_END


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over the whole byte alphabet: any text can be encoded, and is decoded to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = Random(SEED)
    texts = ["".join(sample(rng)) for _ in range(4000)]
    for special in SPECIALS:
        texts = [text.replace(special, "\n") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def rows(tokenizer: Tokenizer, rng: Random) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield rows of LENGTH tokens without end, packed from whole samples: (ids, targets, sample number per token)."""
    ids: list[int] = []
    targets: list[int] = []
    owner: list[int] = []
    while True:
        context, target = sample(rng)
        head = tokenizer.encode(context).ids
        tail = tokenizer.encode(target).ids
        if len(ids) + len(head) + len(tail) > LENGTH:
            short = LENGTH - len(ids)
            yield ids + [0] * short, targets + [IGNORE] * short, owner + [-1] * short
            ids, targets, owner = [], [], []
        number = owner[-1] + 1 if owner else 0
        ids += head + tail
        targets += [IGNORE] * (len(head) - 1) + tail + [IGNORE]
        owner += [number] * (len(head) + len(tail))


def batch(source: Iterator[tuple[list[int], list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """ROWS rows as tensors. Positions restart with each sample, and attention stays within a sample."""
    drawn = [next(source) for _ in range(ROWS)]
    ids, targets, owner = (torch.tensor(part) for part in zip(*drawn, strict=True))
    place = torch.arange(LENGTH).expand(ROWS, LENGTH)
    edge = torch.ones_like(owner, dtype=torch.bool)
    edge[:, 1:] = owner[:, 1:] != owner[:, :-1]
    positions = place - torch.where(edge, place, 0).cummax(1).values
    same = owner[:, :, None] == owner[:, None, :]
    mask = (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None]
    return {"input_ids": ids, "targets": targets, "position_ids": positions, "attention_mask": mask}


def new_model() -> Qwen3ForCausalLM:
    """An untrained model of about 0.65 M parameters."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=SPECIALS.index(corpus.IM_END),
        pad_token_id=SPECIALS.index(corpus.END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def train_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Pre-train from scratch, then round the weights to bfloat16."""
    torch.manual_seed(SEED)
    model = new_model()
    inner = [p for p in model.parameters() if p.ndim == 2 and VOCAB not in p.shape]
    outer = [p for p in model.parameters() if p.ndim != 2 or VOCAB in p.shape]
    optimizers = [
        torch.optim.Muon(inner, lr=PEAK_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    source = rows(tokenizer, Random(SEED + 1))
    began = time.monotonic()
    for step in range(STEPS):
        warm = min(1.0, (step + 1) / 30)
        lr = PEAK_LR * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        inputs = batch(source)
        targets = inputs.pop("targets")
        logits = model(**inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s", flush=True)
    model.bfloat16()
    return model.eval()


def save(tokenizer: Tokenizer, model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the model and its tokenizer in the layout that `from_pretrained` reads."""
    out.mkdir(parents=True, exist_ok=True)
    config = model.config
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    layout = json.loads(tokenizer.to_str())
    for token in layout["added_tokens"]:
        token["special"] = token["content"] in CONTROL  # decoding with skip_special_tokens drops special tokens
    (out / "tokenizer.json").write_text(json.dumps(layout, indent=1, ensure_ascii=False) + "\n", "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": corpus.IM_END,
        "pad_token": corpus.END_OF_TEXT,
        "additional_special_tokens": list(CONTROL[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--out", type=Path, default=model_path(), help="directory to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = train_tokenizer()
    save(tokenizer, train_model(tokenizer), out)


if __name__ == "__main__":
    main()
