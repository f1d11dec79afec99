"""Updates of one family's model in a vLLM in this process, compared with a vLLM that is started with the new weights.

    python -m tests.component.updated_family FAMILY DTYPE DIRECTORY

writes what it found as JSON in the last line. `DIRECTORY` has room for checkpoints.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from skyrl.inference.vllm_command import WEIGHT_UPDATES
from tests.families import CONTEXT, MIXTURES, VOCAB, make_family
from tests.own_experts import own_experts

SERVED: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "gpt-oss": {
        "rope_parameters": MIXTURES["gpt-oss"]["rope_parameters"]
        | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    },
}
"""Where vLLM takes other shapes than those of `tests.families`, or needs settings that transformers does not."""
WRITTEN = {
    "deepseek-v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minimax-m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
}
"""What released models have in config.json, vLLM reads, and transformers does not write."""
FILE = "model.safetensors"
PROMPT = [(7 * n * n + 3 * n) % VOCAB for n in range(40)]
EVERY = 5
"""A partial update has every fifth tensor."""

Answer = tuple[list[float], list[int], Any]


class Served:
    """A vLLM with the weights of `directory`."""

    def __init__(self, directory: Path, dtype: Any) -> None:
        self._llm = LLM(
            str(directory),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=CONTEXT,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            enable_return_routed_experts=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            distributed_executor_backend="uni",
            seed=0,
            worker_extension_cls=WEIGHT_UPDATES["worker_extension_cls"],
        )

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Of the worker's extension. Waits for a job."""
        answer = self._ask(call, arguments)
        if "job" not in answer:
            return answer
        numbers = [answer["job"]]
        while (answer := self._ask("job", {"numbers": numbers})).get("running"):
            time.sleep(0.01)
        return answer

    def _ask(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        (answer,) = self._llm.collective_rpc("skyrl_weights", args=(call, arguments))
        return answer

    def update(self, directory: Path, *, partial: bool) -> None:
        read = self.call("read", directory=str(directory), version="1", checksums=None, partial=partial)
        assert read["ok"], read
        applied = self.call("apply", partial=partial)
        assert applied["ok"], applied
        assert applied["broken"] is None, applied
        self.call("mark_broken", reason=None)

    def answer(self) -> Answer:
        """Logprobs of all tokens but the first, the tokens, and the record of experts."""
        self._llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=0, logprobs=0, detokenize=False)
        made: Any
        (made,) = self._llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        sampled = made.outputs[0]
        rows = [*made.prompt_logprobs[1:], *sampled.logprobs]
        tokens = [*PROMPT, *sampled.token_ids]
        return [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)], tokens, sampled.routed_experts


def changed(source: Path, directory: Path, seed: int) -> Path:
    """A checkpoint whose every tensor differs from `source`'s."""
    shutil.copytree(source, directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / FILE)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * 0.1
        tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, directory / FILE, {"format": "pt"})
    return directory


def reference(directory: Path, tokens: list[int]) -> tuple[list[float], Any]:
    """transformers' logprobs, and the experts that its routers choose, [tokens, layers with experts, k] ascending."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor(tokens)
    with torch.no_grad():
        rows = model(ids[None]).logits[0].log_softmax(-1)[:-1]
        experts = own_experts(model, ids)
    return rows.gather(1, ids[1:, None])[:, 0].tolist(), np.sort(experts.numpy(), axis=2)


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def same(one: Answer, other: Answer) -> bool:
    return one[:2] == other[:2] and bool((one[2] == other[2]).all())


def main() -> None:
    family, dtype, root = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    old = Path(make_family(family, root, **SERVED.get(family, {})))
    config = json.loads((old / "config.json").read_text()) | WRITTEN.get(family, {})
    (old / "config.json").write_text(json.dumps(config))
    new = changed(old, root / "new", 1)
    mixed = Path(shutil.copytree(new, root / "mixed"))
    part = {name: tensor for n, (name, tensor) in enumerate(load_file(old / FILE).items()) if n % EVERY == 0}
    (root / "part").mkdir()
    save_file(part, root / "part" / FILE)
    save_file(load_file(new / FILE) | part, mixed / FILE, {"format": "pt"})

    found: dict[str, Any] = {}
    served = Served(old, dtype)
    first = served.answer()
    served.update(new, partial=False)
    whole, whole_sums = served.answer(), served.call("checksum")["checksums"]
    served.update(root / "part", partial=True)
    partly, partly_sums = served.answer(), served.call("checksum")["checksums"]
    wrong = 0
    for name, tensor in load_file(mixed / FILE).items():
        shown = served.call("weight", name=name, most=2)
        wrong += shown["ok"] and not np.allclose(shown["rows"], tensor[:2].float().numpy(), rtol=1e-2)
    del served
    served = Served(new, dtype)
    found["whole"] = same(whole, served.answer()), whole_sums == served.call("checksum")["checksums"]
    del served
    served = Served(mixed, dtype)
    found["partly"] = same(partly, served.answer()), partly_sums == served.call("checksum")["checksums"]
    logprobs, experts = reference(new, whole[1])
    record = np.sort(whole[2].astype(np.int64), axis=2)
    recorded = record[:, record.any(axis=(0, 2))]
    right = recorded == experts[:-1] if recorded.shape == experts[:-1].shape else np.zeros((1, 1, 1), bool)
    found |= {
        "moved": furthest(first[0], whole[0]),
        "moved_back": furthest(whole[0], partly[0]),
        "off": furthest(whole[0], logprobs),
        "read_wrong": int(wrong),
        "record": [*record.shape],
        "rows": float(right.all(axis=(1, 2)).mean()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
