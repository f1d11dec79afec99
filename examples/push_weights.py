"""A torch training loop of your own that updates two inference servers in every step while they sample.

The loop is plain transformers and torch: it trains on its own samples, those with the highest reward. New weights go to
all servers in turn as a checkpoint on disk and over a gloo group, each time with samples in flight. Those finish with
the new weights. After each step a sample of each server is compared with the trainer's own model.

    skyrl rollout --num-engines 2          # on port 30000
    python examples/push_weights.py

The model must be the one that the servers have; the default is skyrl's tiny model, as theirs is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from skyrl.base.tiny import model_path
from skyrl.weights.disk import CheckpointOnDisk
from skyrl.weights.group import TrainerGroup
from skyrl.weights.protocol import push
from skyrl.weights.tensors import in_buckets
from skyrl.weights.workers import Workers

GROUP, NEW_TOKENS, BUCKET_BYTES = 8, 400, 2**20


class Samples:
    """Asks for samples in the background."""

    def __init__(self, url: str, prompt: list[int]) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self._pool = ThreadPoolExecutor(GROUP)
        self.prompt = prompt

    def one(self, url: str = "", **sampling: Any) -> dict[str, Any]:
        body = {"input_ids": self.prompt, "sampling_params": {"ignore_eos": True} | sampling, "return_logprob": True}
        answer = self._http.post(f"{url}/generate", json=body)
        answer.raise_for_status()
        return answer.json()

    def group(self) -> list[Future[dict[str, Any]]]:
        return [self._pool.submit(self.one, max_new_tokens=NEW_TOKENS, temperature=1.0) for _ in range(GROUP)]

    def close(self) -> None:
        self._pool.shutdown()
        self._http.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router-url", default="http://127.0.0.1:30000")
    parser.add_argument("--admin-key", default=os.environ.get("SKYRL_ADMIN_KEY"))
    parser.add_argument("--model", type=Path, default=model_path(), help="the directory of the servers' model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="float32 on a CPU; bfloat16 needs more")
    options = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    samples = Samples(options.router_url, tokenizer("count from 3 by 2\n").input_ids)
    workers = asyncio.run(Workers.behind(options.router_url, options.admin_key))
    ranks = asyncio.run(workers.ranks())
    print(f"{len(ranks)} servers behind {options.router_url}, {sum(ranks.values())} ranks")

    with tempfile.TemporaryDirectory() as directory:
        media = (("disk", CheckpointOnDisk(workers, Path(directory))), ("gloo", TrainerGroup(workers)))
        chosen = [answer.result() for answer in samples.group()]
        for step in range(options.steps):
            loss = train(model, optimizer, samples.prompt, chosen)
            in_flight = samples.group()
            name, medium = media[step % 2]
            started = time.monotonic()
            push(medium, str(step + 1), in_buckets(model.named_parameters(), most_bytes=BUCKET_BYTES))
            seconds = time.monotonic() - started
            answers = [answer.result() for answer in in_flight]  # raises if one was lost
            both = sum(check_versions(answer, step) for answer in answers)
            gap = max(difference(model, samples, url, step + 1) for url in workers.urls)
            print(
                f"step {step + 1}: loss {loss:.3f}, {name} {seconds:.2f} s, {len(answers)} samples finished, {both} of "
                f"them with both weights, logprobs differ by {gap:.1e}"
            )
            if not gap <= options.tolerance:
                raise SystemExit(f"the servers do not have the trainer's weights: {gap} > {options.tolerance}")
            chosen = sorted(answers, key=reward)[-GROUP // 2 :]
    samples.close()


def reward(answer: dict[str, Any]) -> float:
    """The share of different tokens: the tiny model repeats itself."""
    return len(set(answer["output_ids"])) / len(answer["output_ids"])


def train(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, prompt: list[int], answers: list[dict[str, Any]]
) -> float:
    """One step of cross-entropy on the answers."""
    batch = torch.tensor([prompt + answer["output_ids"] for answer in answers])
    labels = batch.clone()
    labels[:, : len(prompt)] = -100
    loss = model(batch, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def check_versions(answer: dict[str, Any], step: int) -> bool:
    """Whether the sample has tokens of both weights. The version of each token is known, and none is missing."""
    spans = answer["meta_info"]["weight_versions"]
    versions = [span["version"] for span in spans]
    old, new = "default" if step == 0 else str(step), str(step + 1)
    assert versions in ([old], [new], [old, new]), versions
    assert [span["start"] for span in spans] + [NEW_TOKENS] == [0] + [span["end"] for span in spans]
    return len(spans) == 2


def difference(model: PreTrainedModel, samples: Samples, url: str, version: int) -> float:
    """The largest difference between the logprobs of a greedy sample of a server and the trainer's own."""
    answer = samples.one(url, max_new_tokens=32, temperature=0.0)
    assert answer["meta_info"]["weight_version"] == str(version)
    tokens = samples.prompt + answer["output_ids"]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    first = len(samples.prompt) - 1
    own = rows[first:-1].gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    theirs = torch.tensor([triple[0] for triple in answer["meta_info"]["output_token_logprobs"]])
    return (own - theirs).abs().max().item()


if __name__ == "__main__":
    main()
