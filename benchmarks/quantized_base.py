"""A frozen base in 8 and 4 bits beside the full dtype: memory, CPU time of a step, and how far logprobs are apart.

Usage: python -m benchmarks.quantized_base [--models tiny quarter 0.6b] [--vllm] [--out FILE]

Each model is quantized as `skyrl quantize` does, in groups of 64 columns. Each row is a process of its own: it loads
the base (kept in its bits, or computed at loading), and trains two steps of an adapter of rank 16, with layers computed
again in the backward. `held` are the bytes of the base, `load` is the peak of the process while it loads above its
start, and `step` that of a step above what it holds then. The gap is that of the trainer's logprobs to those of the
full model, in nats: the mean over tokens of the absolute value. With --vllm also that of vLLM's logprobs to the
trainer's with the same files. On a CPU vLLM serves the full model in float32, 4 bits in bfloat16, and no 8 bits.

tiny is trained on its corpus; its text is measured. The others have random weights, and random tokens: their gaps say
nothing of a released model.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from transformers.utils.logging import disable_progress_bar

from benchmarks import program
from benchmarks.models import make_large, make_quarter
from benchmarks.processes import cpu_seconds, forget_peak, peak_resident_mb, resident_mb
from skyrl.base.tiny import model_path

MODELS: dict[str, Callable[[Path], str]] = {
    "tiny": lambda directory: str(model_path()),
    "quarter": make_quarter,
    "0.6b": make_large,
}
GROUP = 64
TEXTS, RANDOM = (4, 128), (2, 64)
"""Sequences and tokens of each: of tiny's corpus, and random ones."""
ROWS = ("full", "8 bits, computed at loading", "8 bits", "4 bits, computed at loading", "4 bits")
RANK = 16
Row = dict[str, Any]


def main() -> None:
    parser = program.parser("quantized_base", __doc__, out="bench/quantized-base.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "quarter"])
    parser.add_argument("--vllm", action="store_true", help="compare vLLM's logprobs, too")
    options = parser.parse_args()
    rows: list[Row] = []
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="skyrl-quantized-") as directory:
            rows += compare(model, Path(directory), vllm=options.vllm)
    program.write(options.out, rows)


def compare(model: str, directory: Path, *, vllm: bool) -> list[Row]:
    """The rows of one model, printed as they come."""
    path = MODELS[model](directory / "full")
    texts = directory / "texts.npy"
    np.save(texts, _texts(model))
    print(f"{model:8} {'base':28} {'held':>9} {'load':>9} {'step':>9} {'CPU s':>7} {'gap':>9} {'vLLM':>9}")
    rows: list[Row] = []
    full: np.ndarray[Any, Any] | None = None
    for name in ROWS:
        bits = 0 if name == "full" else int(name[0])
        release = str(directory / f"{bits}-bits") if bits else path
        if bits and not Path(release).exists():
            _in_process(quantized, path, release, str(bits), str(GROUP))
        kept = bits > 0 and "loading" not in name
        row = {"model": model, "base": name} | _in_process(trained, release, str(texts), "kept" if kept else "")
        logprobs = np.array(row.pop("logprobs"))
        full = logprobs if full is None else full
        row["gap"] = float(np.abs(logprobs - full).mean())
        if vllm and bits != 8 and (kept or not bits):
            of_vllm = np.array(_in_process(sampled, release, str(texts))["logprobs"])
            row["vllm_gap"] = float(np.abs(of_vllm - logprobs).mean())
        rows.append(row)
        print(
            f"{'':8} {name:28} {row['held_mb']:6.1f} MB {row['load_mb']:6.0f} MB {row['step_mb']:6.0f} MB "
            f"{row['step_cpu_s']:7.2f} {row['gap']:9.5f} {row.get('vllm_gap', float('nan')):9.5f}",
            flush=True,
        )
    return rows


def _texts(model: str) -> np.ndarray[Any, Any]:
    """int64 [sequences, tokens]."""
    if model != "tiny":
        return np.random.default_rng(0).integers(0, 32_768, RANDOM)
    from transformers import AutoTokenizer

    from skyrl.base.tiny.corpus import paragraph

    random, tokens = Random(0), []
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path())
    sequences, length = TEXTS
    while len(tokens) < sequences * length:
        tokens += tokenizer.encode(paragraph(random, 4) + "\n")
    return np.array(tokens[: sequences * length]).reshape(sequences, length)


def quantized(path: str, release: str, bits: str, group_size: str) -> dict[str, Any]:
    from skyrl.trainer.tools.quantize import Scheme, quantize

    start = resident_mb(os.getpid())
    written = quantize(path, Path(release), Scheme(int(bits), int(group_size)))
    return {"files_mb": written.bytes / 1e6, "peak_mb": peak_resident_mb(os.getpid()) - start}


def trained(path: str, texts: str, keep_quantized: str) -> dict[str, Any]:
    """Logprobs of the texts by the base model; the base's bytes; peaks of the process above its start while it loads
    and above what it then holds in a step; and the CPU seconds of the second of two steps. In megabytes."""
    from skyrl.base.config.loading import load_config
    from skyrl.base.types.weights import LoraSpec
    from skyrl.trainer.protocol import AdamParams, Datum, PassResult, TrainingPass
    from skyrl.trainer.quantized.weights import held_bytes
    from skyrl.trainer.ranks.lora_backend import LoraBackend
    from tests.local_ranks import rank_of

    settings = {"trainer.keep_quantized": bool(keep_quantized), "trainer.gradient_checkpointing": True}
    config = load_config({"base_model": path, "backend_config": settings})
    own = os.getpid()
    start = resident_mb(own)
    backend = LoraBackend(config)
    loaded = peak_resident_mb(own) - start
    backend.create_model("m", LoraSpec(RANK, 32.0, seed=1))
    data = [Datum(text[:-1], {"target_tokens": text[1:]}) for text in np.load(texts)]

    def run(*, backward: bool) -> PassResult:
        (outcome,) = backend.run([TrainingPass("m", data, "cross_entropy", backward=backward)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    logprobs = np.concatenate(run(backward=False).logprobs)
    spent, peak = 0.0, 0.0
    for _ in range(2):
        forget_peak()
        before, resident = cpu_seconds(own), resident_mb(own)
        run(backward=True)
        spent, peak = cpu_seconds(own) - before, peak_resident_mb(own) - resident
        backend.optim_step("m", AdamParams())
    held = held_bytes(rank_of(backend).base.packed.model.parameters())
    return {
        "logprobs": logprobs.tolist(),
        "held_mb": held / 1e6,
        "load_mb": loaded,
        "step_mb": peak,
        "step_cpu_s": spent,
    }


def sampled(path: str, texts: str) -> dict[str, Any]:
    """vLLM's logprobs of the texts, in the dtype that a server starts it with."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    from skyrl.base.model_files import json_of
    from skyrl.inference.model_options import has_delta_rule

    config = json_of(path, "config.json")
    dtype = "bfloat16" if "quantization_config" in config or has_delta_rule(config) else "float32"
    tokens = np.load(texts)
    llm = LLM(path, dtype=dtype, max_model_len=tokens.shape[1] + 1, enforce_eager=True, skip_tokenizer_init=True)
    prompts: list[Any] = [{"prompt_token_ids": text.tolist()} for text in tokens]
    answers = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
    found: list[float] = []
    for text, answer in zip(tokens, answers, strict=True):
        assert answer.prompt_logprobs is not None
        for token, of_place in list(zip(text.tolist(), answer.prompt_logprobs, strict=True))[1:]:
            assert of_place is not None
            found.append(of_place[token].logprob)
    return {"logprobs": found}


def _in_process(function: Callable[..., Row], *arguments: str) -> Row:
    """What the function returns in a new process, whose peak of memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), disable_progress_bar) as pool:
        return pool.submit(function, *arguments).result()


if __name__ == "__main__":
    main()
