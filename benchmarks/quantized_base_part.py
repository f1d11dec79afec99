"""What `benchmarks.quantized_base` runs in a process of its own: FUNCTION FILE ARGUMENTS. Writes JSON to the file.

Knows the backend, and vLLM's own Python interface. Knows nothing of tables.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import cpu_seconds, forget_peak, peak_resident_mb, resident_mb

RANK = 16


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
    from skyrl.trainer.ranks.lora_backend import TorchLoraBackend

    settings = {"trainer.keep_quantized": bool(keep_quantized), "trainer.gradient_checkpointing": True}
    config = load_config({"base_model": path, "backend_config": settings})
    own = os.getpid()
    start = resident_mb(own)
    backend = TorchLoraBackend(config)
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
    held = held_bytes(backend._base.packed.model.parameters())
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


def main() -> None:
    made = {"quantized": quantized, "trained": trained, "sampled": sampled}[sys.argv[1]](*sys.argv[3:])
    Path(sys.argv[2]).write_text(json.dumps(made))  # vLLM's processes write to the standard output
