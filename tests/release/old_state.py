"""The state directory of the last version's server after a short run, and what that server answered.

`.venv/bin/python -m tests.release.old_state` makes `last_version.tar.xz` with the version in this checkout. Run it
before the version moves on.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from skyrl import __version__
from skyrl.base.tiny import model_path
from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import cross_entropy, train
from tests.servers import ready

ARCHIVE = Path(__file__).parent / "last_version.tar.xz"
ANSWERS = "answers.json"
KEY = "tml-release"
PROMPT = [5, 6, 7]
DATA = [cross_entropy(list(range(5, 25)))]
LEARNING_RATE = 1e-2
TOKENS = 12

_LEFT_OUT = ("logs", "run", "lock", "serve.log", "token-secret", "url-secret")
"""What of a state directory no server needs. A server without the secrets, which sign tokens, makes new ones."""


@dataclass(frozen=True)
class Answers:
    """What the server of the last version answered. `state` and `sampler` are paths of its checkpoints; `tokens` and
    `logprobs` are a greedy sample of PROMPT; `losses` are those of two more steps from `state`, with its optimizer."""

    version: str
    run: str
    state: str
    sampler: str
    tokens: list[int]
    logprobs: list[float]
    losses: list[float]


def unpack(directory: Path) -> Answers:
    """Put the kept state directory at `directory`, which must not exist."""
    directory.mkdir(mode=0o700)
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(directory, filter="data")
    return Answers(**json.loads((directory / ANSWERS).read_text()))


def sample(client: tinker.ServiceClient, sampler: str) -> tuple[list[int], list[float]]:
    """The tokens of a greedy sample of PROMPT, and their logprobs."""
    params = types.SamplingParams(max_tokens=TOKENS, temperature=0.0, stop=[])
    sampling = client.create_sampling_client(model_path=sampler).result()
    answer = sampling.sample(types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=params).result()
    (sequence,) = answer.sequences
    assert sequence.logprobs is not None
    return [*sequence.tokens], [*np.asarray(sequence.logprobs, float)]


def go_on(client: tinker.ServiceClient, state: str) -> list[float]:
    """The losses of two more steps. The second depends on the optimizer's state."""
    resumed = client.create_training_client_from_state_with_optimizer(state).result()
    return train(resumed, DATA, steps=2, learning_rate=LEARNING_RATE)


def answers_of(server: DemoServer) -> Answers:
    """A short run on a new server: train, save, sample, and go on from the save."""
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=2, seed=1).result()
        train(trainer, DATA, steps=3, learning_rate=LEARNING_RATE)
        state = trainer.save_state("last").result().path
        sampler = trainer.save_weights_for_sampler("final").result().path
        tokens, logprobs = sample(client, sampler)
        run = trainer.get_info().model_id
        return Answers(__version__, run, state, sampler, tokens, logprobs, go_on(client, state))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "state"
        # A copy, because adapters hold the path of their base model, and this checkout's path should not be kept.
        base = shutil.copytree(model_path(), Path(scratch) / "model")
        with ready(DemoServer(directory, "--base-model", str(base), "--served-model-name", "tiny")) as server:
            answers = answers_of(server)
        (directory / ANSWERS).write_text(json.dumps(asdict(answers), indent=1) + "\n")
        with tarfile.open(ARCHIVE, "w:xz") as packed:
            for path in sorted(directory.iterdir()):
                if path.name not in _LEFT_OUT:
                    packed.add(path, path.name)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes, version {answers.version}")


if __name__ == "__main__":
    main()
