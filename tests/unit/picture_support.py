"""Helpers for tests of pictures in training: files of pictures, sequences with pictures, and what transformers makes of
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from typing import Any, Self

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch_lora_support import VOCAB
from transformers import AutoImageProcessor

from skyrl.base.pictures.picture import PictureFormat, PlacedPicture, digest_of
from skyrl.trainer.protocol import Datum, TrainingPass
from tests.families import IMAGE_TOKEN, make_family

SEEING_FAMILIES = ("qwen3-vl", "qwen3.5 that sees", "qwen3-vl-moe", "qwen3.5-moe that sees")


def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directories of tiny models, by the names of their families; each is made at its first use."""
    return cache(lambda family: make_family(family, tmp_path_factory.mktemp("seeing")))


@dataclass(frozen=True)
class Picture:
    """The file of a picture whose sides are multiples of 32 pixels: rows x columns tokens."""

    data: bytes
    rows: int
    columns: int
    format: PictureFormat = "png"

    @classmethod
    def drawn(cls, seed: int, rows: int = 2, columns: int = 3, format: PictureFormat = "png") -> Self:
        """Random pixels."""
        pixels = np.random.default_rng(seed).integers(0, 256, (rows * 32, columns * 32, 3), np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).save(file, format)
        return cls(file.getvalue(), rows, columns, format)

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def digest(self) -> str:
        return digest_of(self.data)


Part = Picture | Sequence[int]


@dataclass
class Sequences:
    """Sequences of text and pictures, and the files of these pictures."""

    data: list[Datum] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, *parts: Part, answer: int = 1, loss: str = "cross_entropy", seed: int = 0) -> Datum:
        """A sequence of these parts, trained on its last `answer` targets; the very last one is drawn. Targets that
        are tokens of pictures are 0, as the cookbook sends them."""
        ids: list[int] = []
        targets: list[int] = []
        placed: list[PlacedPicture] = []
        for part in parts:
            if isinstance(part, Picture):
                placed.append(PlacedPicture(len(ids), part.tokens, part.digest, part.format))
                self.files[part.digest] = part.data
                ids += [IMAGE_TOKEN] * part.tokens
                targets += [0] * part.tokens
            else:
                ids += part
                targets += part
        rng = np.random.default_rng(seed)
        inputs: dict[str, Any] = {"target_tokens": np.array([*targets[1:], rng.integers(0, VOCAB)])}
        trained = np.arange(len(ids)) >= len(ids) - answer
        if loss == "cross_entropy":
            inputs["weights"] = np.where(trained, rng.choice([1.0, 0.5, -0.25], len(ids)), 0).astype(np.float32)
        else:
            inputs["logprobs"] = np.where(trained, -5 + rng.normal(size=len(ids)), 0).astype(np.float32)
            inputs["advantages"] = np.where(trained, rng.normal(), 0).astype(np.float32)
        self.data.append(Datum(np.array(ids), inputs, tuple(placed)))
        return self.data[-1]

    def to(self, model_id: str, loss_fn: str = "cross_entropy", *, backward: bool = True) -> TrainingPass:
        return TrainingPass(model_id, self.data, loss_fn, backward=backward, files=self.files)


def text(seed: int, count: int) -> list[int]:
    """Random ids, none of which stands for a picture."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def group(picture: Picture, samples: int, *, prompt: int = 10, answer: int = 6, loss: str = "ppo") -> Sequences:
    """Answers to one question about a picture, of 2 to `answer` tokens."""
    made = Sequences()
    before, behind = text(1, 4), text(2, prompt)
    for sample in range(samples):
        length = 2 + sample % (answer - 1)
        own = text(100 + sample, length - 1)
        made.add(before, picture, behind, own, answer=length, loss=loss, seed=sample)
    return made


def mixed() -> Sequences:
    """Pictures in the middle, at the start, at the end, two of them, none; and several answers to one question."""
    a, b, c = Picture.drawn(1), Picture.drawn(2, 3, 2), Picture.drawn(3, 1, 5, "jpeg")
    made = Sequences()
    made.add(text(1, 5), a, text(2, 12), answer=8, seed=1)
    made.add(b, text(3, 9), answer=9, seed=2)
    made.add(text(4, 7), c, answer=1, seed=3)
    made.add(text(5, 4), a, text(6, 3), b, text(7, 11), answer=6, seed=4)
    made.add(text(8, 17), answer=17, seed=5)
    for sample in range(3):
        made.add(text(9, 6), c, text(10, 13), text(20 + sample, 3 + sample), answer=4 + sample, seed=6 + sample)
    return made


def of_transformers(path: str, datum: Datum, files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The arguments of transformers' model for a sequence, from the files by transformers' own processor."""
    ids = torch.from_numpy(datum.tokens)[None]
    if not datum.pictures:
        return {"input_ids": ids}
    processor: Any = AutoImageProcessor.from_pretrained(path)
    images = [Image.open(BytesIO(files[picture.digest])).convert("RGB") for picture in datum.pictures]
    made = processor(images=images, return_tensors="pt")
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE_TOKEN).int(), **made}


def logprobs_of(model: Any, path: str, datum: Datum, files: Mapping[str, bytes]) -> Tensor:
    """Of the targets, as transformers' model computes them, on its device: float32 [N]."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in of_transformers(path, datum, files).items()}
    logits = model(**inputs, use_cache=False).logits[0].float()
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"]).to(device)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
