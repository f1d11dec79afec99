"""A trainer of the tests' own: checkpoints of the tiny model, their logprobs, and the trainer's side of a group, formed
by the recipe that RL frameworks use.

    python -m tests.plane.trainer PORT WORLD NAME CHECKPOINT TENSORS

forms a group as rank 0, broadcasts the first TENSORS tensors of a checkpoint one by one, and then waits for its end.
It writes a line before it forms the group, and one after each tensor.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous
from transformers import AutoModelForCausalLM

GROUP_S = 30.0


def save_variant(source: Path, directory: Path, seed: int) -> None:
    """A checkpoint in float32 whose every tensor differs from `source`'s."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    model.save_pretrained(directory)


class Reference:
    """The model of a checkpoint in transformers, in float64; mixtures of experts have kernels for float32."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float64) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of each token but the first, given those before it."""
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens])).logits[0]
        rows = torch.log_softmax(logits, -1)[:-1]
        return rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    def experts(self, tokens: list[int], per_token: int) -> Any:
        """Those that a mixture chooses for each token: [tokens, layers, per_token], in order of their numbers."""
        with torch.no_grad():
            layers = self._model(torch.tensor([tokens]), output_router_logits=True).router_logits
        return torch.stack([logits.topk(per_token).indices for logits in layers], 1).sort(-1).values.numpy()


def usual_group(port: int, world: int, name: str, timeout_s: float = GROUP_S) -> Any:
    """Rank 0 of a gloo group beside the default group, as RL frameworks form it."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world, timeout=timeout))
    store.set_timeout(timeout)
    prefixed = distributed_c10d.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], "gloo", prefixed, group_name=distributed_c10d.GroupName(name), timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {one: one for one in range(world)}
    return group


def main() -> None:
    port, world, name, checkpoint, count = sys.argv[1:]
    tensors = load_file(Path(checkpoint) / "model.safetensors")
    print("up", flush=True)  # its imports take longer than a group may take to form
    group = usual_group(int(port), int(world), name)
    for tensor in list(tensors.values())[: int(count)]:
        dist.broadcast(tensor.contiguous(), 0, group=group)
        print("sent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
