"""Compares training on a group of answers about one picture: the backend, which computes picture and question once; the
same answers in passes of their own; and a padded loop over PEFT on transformers' model. In turns, in one process.

Usage: python -m benchmarks.pictures [--side PIXELS] [--samples N] [--rounds N] [--threads N] [--clock cpu]
                                     [--out FILE]

A step is a forward_backward and an optim_step, from files and arrays to results. Each step has a new picture, so that
no way can keep what an earlier step has made. Float32 on a CPU; the models' weights are random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import machine, program
from benchmarks.models import make_seeing
from benchmarks.table import aligned, number
from skyrl.base.config.loading import load_config
from skyrl.base.pictures.picture import PlacedPicture, digest_of
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import AdamParams, Datum, ModelLimits, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend

STEP = AdamParams(learning_rate=1e-4, eps=1e-8)
QUESTION, ANSWER = 64, (32, 64)
"""Tokens of the question, and the fewest and most of an answer."""
BASELINE = "peft"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TEXT_IDS = 1000
"""Drawn texts have lower ids, among which none stands for a picture."""


@dataclass(frozen=True)
class Group:
    """Answers about one picture, at position 4 of each sequence. `file`: a JPEG."""

    data: list[Datum]
    file: bytes

    @property
    def files(self) -> dict[str, bytes]:
        return {digest_of(self.file): self.file}

    @property
    def tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True)
class Trained:
    """`logprobs`: of the targets with an advantage. `rows`: that went through the language model."""

    loss: float
    logprobs: np.ndarray
    rows: float


def draw(limits: ModelLimits, side: int, samples: int, seed: int) -> Group:
    """A group about a square picture of random pixels."""
    sight = limits.sight
    assert sight is not None
    rng = np.random.default_rng(seed)
    file = BytesIO()
    Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(file, "jpeg")
    picture = PlacedPicture(4, sight.tokens(side, side), digest_of(file.getvalue()), "jpeg")
    before, question = rng.integers(0, TEXT_IDS, 4), rng.integers(0, TEXT_IDS, QUESTION)
    seen = np.full(picture.tokens, sight.image_token_id)
    prompt = np.concatenate([before, seen, question])
    data: list[Datum] = []
    for _ in range(samples):
        text = np.concatenate([prompt, rng.integers(0, TEXT_IDS, rng.integers(*ANSWER, endpoint=True))])
        answered = np.arange(1, len(text)) >= len(prompt)
        logprobs = np.where(answered, -np.log(limits.vocab_size) + 0.1 * rng.normal(size=len(text) - 1), 0)
        inputs: Any = {
            "target_tokens": text[1:],
            "logprobs": logprobs.astype(np.float32),
            "advantages": np.where(answered, rng.normal(), 0).astype(np.float32),
        }
        data.append(Datum(text[:-1], inputs, (picture,)))
    return Group(data, file.getvalue())


class Skyrl:
    """One pass for the group, or with `apart` one for each answer."""

    def __init__(self, backend: LoraBackend, *, apart: bool) -> None:
        """The backend has a model "m"."""
        self._backend, self._apart = backend, apart

    def step(self, group: Group) -> Trained:
        parts = [[datum] for datum in group.data] if self._apart else [group.data]
        passes = [TrainingPass("m", part, "importance_sampling", files=group.files) for part in parts]
        results = [_result(outcome) for each in passes for outcome in self._backend.run([each])]
        self._backend.optim_step("m", STEP)
        logprobs = [lp for result in results for lp in result.logprobs]
        return Trained(
            sum(result.metrics["loss:sum"] for result in results),
            np.concatenate([lp[_answered(datum)] for lp, datum in zip(logprobs, group.data, strict=True)]),
            sum(result.metrics["computed_tokens:sum"] for result in results),
        )


def _result(outcome: PassResult | Exception) -> PassResult:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _answered(datum: Datum) -> np.ndarray:
    return datum.loss_inputs["advantages"] != 0


class Peft:
    """The group as one padded batch with a picture in each row, as transformers' processor gives it."""

    def __init__(self, model: str, adapter: Path) -> None:
        from peft import PeftModel
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        loaded: Any = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="sdpa").eval()
        self._model: Any = PeftModel.from_pretrained(loaded, str(adapter), is_trainable=True).eval()
        self._processor: Any = AutoImageProcessor.from_pretrained(model)
        trained = [value for value in self._model.parameters() if value.requires_grad]
        betas = (STEP.beta1, STEP.beta2)
        self._optimizer = torch.optim.AdamW(trained, lr=STEP.learning_rate, betas=betas, eps=STEP.eps, weight_decay=0)

    def step(self, group: Group) -> Trained:
        longest = max(len(datum.tokens) for datum in group.data)
        rows = np.zeros((4, len(group.data), longest), np.int64)
        for row, datum in enumerate(group.data):
            length, (picture,) = len(datum.tokens), datum.pictures
            rows[:2, row, :length] = datum.tokens, datum.loss_inputs["target_tokens"]
            rows[2, row, :length] = 1
            rows[3, row, picture.start : picture.stop] = 1
        ids, targets, mask, types = torch.from_numpy(rows)
        image = Image.open(BytesIO(group.file)).convert("RGB")
        seen = self._processor(images=[image] * len(group.data), return_tensors="pt")
        logits = self._model(
            input_ids=ids, attention_mask=mask, mm_token_type_ids=types.int(), use_cache=False, **seen
        ).logits
        logprobs = (logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1))[mask.bool()]
        q, advantages = (_flat(group, name) for name in ("logprobs", "advantages"))
        chosen = advantages != 0
        loss = -((logprobs[chosen] - q[chosen]).exp() * advantages[chosen]).sum()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Trained(float(loss.detach()), logprobs.detach()[chosen].numpy(), ids.numel())


def _flat(group: Group, name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([datum.loss_inputs[name] for datum in group.data]))


def measure(
    model: str,
    *,
    side: int,
    samples: int,
    rounds: int,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """The figures of each way, after the same steps from the same weights. The first way of a round is another one in
    each round; the first round does not count. `clock`: in seconds."""
    settings = {"trainer.merge_passes": False}
    config = load_config({"base_model": model, "threads": threads, "backend_config": settings})
    together, apart = LoraBackend(config), LoraBackend(config)
    with TemporaryDirectory(prefix="skyrl-adapter-") as adapter:
        for backend in (together, apart):
            backend.create_model("m", LoraSpec(8, 32.0, 0))
        together.save_adapter("m", Path(adapter))
        peft = Peft(model, Path(adapter))
    ways: dict[str, Callable[[Group], Trained]] = {
        BASELINE: peft.step,
        "skyrl": Skyrl(together, apart=False).step,
        "skyrl, passes apart": Skyrl(apart, apart=True).step,
    }
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    last: dict[str, Trained] = {}
    tokens = 0
    for round_ in range(rounds + 1):
        group = draw(together.limits, side, samples, round_)
        tokens += group.tokens if round_ else 0
        first = round_ % len(names)
        for name in [*names[first:], *names[:first]]:
            began = clock()
            last[name] = ways[name](group)
            if round_:
                seconds[name].append(clock() - began)
    return [
        {
            "way": name,
            "seconds": seconds[name],
            "tokens_per_s": tokens / sum(seconds[name]),
            "ratio": statistics.median(
                theirs / ours for theirs, ours in zip(seconds[BASELINE], seconds[name], strict=True)
            ),
            "rows": last[name].rows,
            "logprob_gap": float(np.abs(last[name].logprobs - last[BASELINE].logprobs).max()),
        }
        for name in names
    ]


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [["way", "seconds", "tokens/s", "÷ peft", "rows", "max |logprob − peft's|"]]
    for each in found:
        values = [statistics.median(each["seconds"]), each["tokens_per_s"], each["ratio"], each["rows"]]
        lines.append([each["way"], *map(number, values), f"{each['logprob_gap']:.1g}"])
    return aligned(lines)


def main() -> None:
    parser = program.parser("pictures", __doc__, out="pictures/pictures.json")
    parser.add_argument("--side", type=int, default=448, help="of the picture, in pixels (default: 448)")
    parser.add_argument("--samples", type=int, default=16, help="answers in the group (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that is busy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = machine.facts() | {name: getattr(options, name) for name in ("side", "samples", "threads", "clock")}
    with TemporaryDirectory(prefix="skyrl-pictures-") as directory:
        model = make_seeing(Path(directory))
        found = measure(
            model,
            side=options.side,
            samples=options.samples,
            rounds=options.rounds,
            threads=options.threads,
            clock=CLOCKS[options.clock],
        )
    print(f"{table(found)}\n\n{', '.join(f'{key} {value}' for key, value in facts.items())}")
    program.write(options.out, {"facts": facts, "results": found})


if __name__ == "__main__":
    main()
