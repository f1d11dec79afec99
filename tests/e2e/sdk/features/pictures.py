"""Pictures in prompts, for a model that sees.

A picture here is a PNG file of one colour, made with the standard library: the environments of the SDKs have no library
for images.
"""

from __future__ import annotations

import struct
import zlib
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
from tinker import types

from ..catalogue import feature
from ..user import User, both, close, logprobs_of, refusal, same, tensor, wait

GROUP = "Pictures"
feature_of_sight = partial(feature, GROUP, sees=True)
VISION_START, VISION_END = 512, 513
"""What the model's chat template writes before and after a picture."""
RED, BLUE = (220, 30, 30), (40, 60, 220)
WIDTH, HEIGHT, TOKENS = 96, 64, 6
"""Of a picture: 32 by 32 pixels are one token."""


def png(colour: tuple[int, int, int], width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """A PNG file of one colour, 8-bit RGB."""

    def part(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")


def image(colour: tuple[int, int, int], **changed: Any) -> types.ImageChunk:
    given: dict[str, Any] = {"data": png(colour), "format": "png", "expected_tokens": TOKENS} | changed
    return types.ImageChunk(**given)


def seen(user: User, *images: Any) -> types.ModelInput:
    """These pictures, then TEXT."""
    chunks: list[Any] = []
    for each in images:
        chunks += [types.EncodedTextChunk(tokens=[VISION_START]), each, types.EncodedTextChunk(tokens=[VISION_END])]
    return types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=user.tokens)])


def lesson(user: User, *images: Any, at: int | None = None) -> types.Datum:
    """Next-token prediction of TEXT after these pictures. `at`: a position with a weight besides."""
    whole = seen(user, *images)
    last = whole.chunks[-1]
    assert isinstance(last, types.EncodedTextChunk)
    given = types.ModelInput(chunks=[*whole.chunks[:-1], types.EncodedTextChunk(tokens=list(last.tokens[:-1]))])
    before = whole.length - len(user.tokens)
    targets = np.asarray([0] * (before - 1) + user.tokens, np.int64)
    weights = np.asarray([0.0] * (before - 1) + [1.0] * len(user.tokens), np.float32)
    if at is not None:
        weights[at] = 1.0
    inputs = {"target_tokens": tensor(targets, np.int64), "weights": tensor(weights)}
    return types.Datum(model_input=given, loss_fn_inputs=inputs)


def text_scores(user: User, trainer: Any, *images: Any) -> np.ndarray:
    """float64: logprobs of TEXT after these pictures, under a training client."""
    output = wait(trainer.forward([lesson(user, *images)], "cross_entropy"))
    return logprobs_of(output)[-len(user.tokens) :]


def tell(user: User, prompt: types.ModelInput, **asked: Any) -> Any:
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    return wait(user.sampler.sample(prompt, 1, params, **asked))


@feature_of_sight("Samples after a picture, with logprobs; another picture changes them.")
def samples_after_a_picture(user: User) -> None:
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    blue = tell(user, seen(user, image(BLUE))).sequences[0].logprobs
    for answer in both(user.sampler, "sample", seen(user, image(RED)), 2, params):
        first, second = answer.sequences
        assert len(first.tokens) == len(second.tokens) == 4
        assert same(first.logprobs, second.logprobs, 1e-5)
        assert not same(first.logprobs, blue, 1e-3)


@feature_of_sight("`ModelInput.length` is the number of positions that the server counts.")
def positions_of_pictures(user: User) -> None:
    prompt = seen(user, image(RED), image(BLUE, data=png(BLUE, 200, 100), expected_tokens=18))
    assert prompt.length == 4 + TOKENS + 18 + len(user.tokens)
    assert len(wait(user.sampler.compute_logprobs(prompt))) == prompt.length
    datum = lesson(user, image(RED))
    assert logprobs_of(wait(user.model.forward([datum], "cross_entropy"))).shape == (datum.model_input.length,)


@feature_of_sight("Without `expected_tokens` too; the server counts the tokens itself.")
def pictures_without_expected_tokens(user: User) -> None:
    counted = wait(user.sampler.compute_logprobs(seen(user, image(RED))))
    assert same(wait(user.sampler.compute_logprobs(seen(user, image(RED, expected_tokens=None))))[-3:], counted[-3:])


@feature_of_sight("`compute_logprobs` and prompt logprobs of text after pictures are the trainer's.")
def logprobs_after_pictures(user: User) -> None:
    for images in ([image(RED)], [image(RED), image(BLUE)], [image(BLUE), image(BLUE)]):
        prompt = seen(user, *images)
        trained = text_scores(user, user.model, *images)
        for scored in both(user.sampler, "compute_logprobs", prompt):
            assert scored[0] is None
            assert same(scored[-len(user.tokens) :], trained)
        answer = tell(user, prompt, include_prompt_logprobs=True, topk_prompt_logprobs=2)
        assert same(answer.prompt_logprobs[-len(user.tokens) :], trained)
        assert len(answer.topk_prompt_logprobs) == prompt.length


@feature_of_sight("`forward_backward` and `optim_step` on pictures: the loss falls, and the sampler gets the weights.")
def training_on_pictures(user: User) -> None:
    trainer = user.train()
    losses = []
    for _ in range(6):
        passed = trainer.forward_backward([lesson(user, image(RED)), lesson(user, image(BLUE))], "cross_entropy")
        wait(trainer.optim_step(types.AdamParams(learning_rate=5e-3)))
        losses.append(wait(passed).metrics["loss:sum"])
    assert losses[-1] < losses[0] / 2
    sampler = wait(trainer.save_weights_and_get_sampling_client())
    scored = wait(sampler.compute_logprobs(seen(user, image(BLUE))))
    assert same(scored[-len(user.tokens) :], text_scores(user, trainer, image(BLUE)))


@feature_of_sight("`forward_backward_custom` on pictures has the gradient of the built-in loss.")
def custom_loss_on_pictures(user: User) -> None:
    def weighted(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        loss = -sum((weight * lp).sum() for weight, lp in zip(weights, logprobs, strict=True))
        return loss, {"mine": float(loss)}

    built_in, custom = user.train(seed=9), user.train(seed=9)
    data = [lesson(user, image(RED))]
    expected = wait(built_in.forward_backward(data, "cross_entropy")).metrics["loss:sum"]
    assert close(wait(custom.forward_backward_custom(data, weighted)).metrics["mine"], expected)
    for trainer in (built_in, custom):
        wait(trainer.optim_step(types.AdamParams(learning_rate=5e-3)))
    assert same(text_scores(user, built_in, image(RED)), text_scores(user, custom, image(RED)), 1e-5)


@feature_of_sight("A weight on a picture's token is refused with its position; the text behind it may have one.")
def no_loss_at_pictures(user: User) -> None:
    trainer = user.train()
    first, last = 0, TOKENS - 1  # the targets at these positions are the picture's first and last tokens
    for position in (first, last):
        datum = lesson(user, image(RED), at=position)
        said = refusal(lambda datum=datum: trainer.forward_backward([datum], "cross_entropy"))
        assert f"position {position}" in said
        assert "weights" in said
    wait(trainer.forward_backward([lesson(user, image(RED), at=last + 1)], "cross_entropy"))


@feature_of_sight("Other `expected_tokens` than the server's fail at once, with both numbers.", statuses=(400,))
def wrong_expected_tokens(user: User) -> None:
    wrong = image(RED, expected_tokens=7)
    sampled = refusal(lambda: user.sampler.compute_logprobs(seen(user, wrong)))
    trained = refusal(lambda: user.train().forward([lesson(user, wrong)], "cross_entropy"))
    for said in (sampled, trained):
        assert "is 7" in said
        assert f"{TOKENS} tokens" in said
        assert "chunks[1].expected_tokens" in said


@feature_of_sight("A picture that was sent before may be named by its SHA-256, in samples.")
def pictures_by_name(user: User) -> None:
    sent = image(RED)
    before = wait(user.sampler.compute_logprobs(seen(user, sent)))
    location = f"sha256:{sha256(sent.data).hexdigest()}"
    named = types.ImageAssetPointerChunk(format="png", location=location, expected_tokens=TOKENS)
    assert same(wait(user.sampler.compute_logprobs(seen(user, named)))[-3:], before[-3:], 1e-5)


@feature_of_sight("Other locations are refused by name; no address is opened.", statuses=(400,))
def pictures_elsewhere(user: User) -> None:
    for location in ("http://127.0.0.1:9/red.png", "file:///etc/passwd", f"sha256:{'0' * 64}"):
        pointer = types.ImageAssetPointerChunk(format="png", location=location, expected_tokens=TOKENS)
        said = refusal(lambda pointer=pointer: user.sampler.compute_logprobs(seen(user, pointer)))
        assert "chunks[1]" in said
        assert "store" in said


@feature_of_sight("A file that is no complete picture is refused with its chunk.", statuses=(400,))
def malformed_pictures(user: User) -> None:
    whole = png(RED)
    for data in (b"", b"GIF89a", whole[:60], whole[:8] + b"\0" * 40):
        said = refusal(lambda data=data: user.sampler.compute_logprobs(seen(user, image(RED, data=data))))
        assert "chunks[1]" in said
    with_other_format = image(RED, format="jpeg")
    assert "png" in refusal(lambda: user.sampler.compute_logprobs(seen(user, with_other_format)))
