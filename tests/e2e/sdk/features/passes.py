"""Passes and steps: forward, backward, custom losses, the optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from tinker import types

from ..catalogue import feature
from ..user import User, both, close, datum, logprobs_of, refusal, same, tensor, wait

GROUP = "Training"
CHUNK = 1024
"""The number of data in one request; the SDK sends more data in several requests."""


@feature(GROUP, "`forward` gives logprobs and leaves no gradient behind.")
def forward(user: User) -> None:
    trainer = user.train(seed=1)
    first, second = (wait(given) for given in both(trainer, "forward", user.data, "cross_entropy"))
    lp = logprobs_of(first)
    assert lp.shape == (len(user.tokens) - 1,)
    assert np.all(lp < 0)
    assert np.array_equal(lp, logprobs_of(second))
    wait(trainer.optim_step(types.AdamParams(learning_rate=1.0)))
    assert np.array_equal(user.scores(trainer), lp)


@feature(GROUP, "`forward_backward` and `optim_step`, submitted as a stream: the loss falls.")
def forward_backward_and_optim_step(user: User) -> None:
    trainer = user.train()
    pending = []
    for _ in range(8):
        passed = trainer.forward_backward(user.data, "cross_entropy")
        pending.append((passed, trainer.optim_step(types.AdamParams(learning_rate=5e-3))))
    losses = [wait(passed).metrics["loss:sum"] for passed, _ in pending]
    metrics = [wait(stepped).metrics for _, stepped in pending]
    assert losses[-1] < losses[0] / 2
    assert all(close(found["learning_rate"], 5e-3) and found["grad_norm"] > 0 for found in metrics)
    assert [found["optimizer_step"] for found in metrics] == list(range(1, 9))


@feature(GROUP, "The same with `*_async` methods.")
def passes_in_asyncio(user: User) -> None:
    trainer = user.train()

    async def learn() -> list[float]:
        losses = []
        for _ in range(4):
            passed = await trainer.forward_backward_async(user.data, "cross_entropy")
            stepped = await trainer.optim_step_async(types.AdamParams(learning_rate=5e-3))
            losses.append((await passed.result_async()).metrics["loss:sum"])
            await stepped.result_async()
        return losses

    losses = wait(learn())
    assert losses[-1] < losses[0]


@feature(GROUP, "Adam's settings count: clipping, decay and both betas change the step.")
def optimizer_settings(user: User) -> None:
    def after(**settings: float) -> np.ndarray:
        trainer = user.train(seed=5)
        for _ in range(2):
            wait(trainer.forward_backward(user.data, "cross_entropy"))
            wait(trainer.optim_step(types.AdamParams(learning_rate=5e-3, **settings)))
        return user.scores(trainer)

    plain = after()
    assert np.array_equal(plain, after(beta1=0.9, beta2=0.95, eps=1e-12))
    for changed in ({"beta1": 0.5}, {"beta2": 0.5}, {"eps": 1.0}, {"weight_decay": 0.5}, {"grad_clip_norm": 1e-3}):
        assert not np.array_equal(plain, after(**changed)), changed


@feature(GROUP, "Gradients of several passes add up until the step.")
def gradient_accumulation(user: User) -> None:
    once, twice = user.train(seed=5), user.train(seed=5)
    half = len(user.tokens) // 2
    parts = [datum(user.tokens[:half]), datum(user.tokens[half:])]
    wait(once.forward_backward(parts, "cross_entropy"))
    for part in parts:
        wait(twice.forward_backward([part], "cross_entropy"))
    for trainer in (once, twice):
        wait(trainer.optim_step(types.AdamParams(learning_rate=5e-3)))
    assert same(user.scores(once), user.scores(twice), 1e-5)


@feature(GROUP, "More data than fits one request: chunks become one result, in order.")
def chunked_forward_backward(user: User) -> None:
    data = [datum([300 + number % 100, 301, 302 + number % 7]) for number in range(CHUNK + 60)]
    output = wait(user.train(seed=1).forward_backward(data, "cross_entropy"))
    assert len(output.loss_fn_outputs) == len(data)
    lp = np.stack([logprobs_of(output, number) for number in range(len(data))])
    assert close(output.metrics["loss:sum"], -lp.sum())
    for number in (0, CHUNK - 1, CHUNK, len(data) - 1):
        alone = wait(user.model.forward([data[number]], "cross_entropy"))
        assert same(logprobs_of(alone), lp[number])


@feature(GROUP, "Two-dimensional targets `[N, K]` with weights.")
def two_dimensional_targets(user: User) -> None:
    targets = np.asarray([[301, 302], [303, 304], [305, 306]])
    weights = np.asarray([[0.5, 1.0], [0.0, 2.0], [-1.0, 0.25]])
    inputs = {"target_tokens": tensor(targets, np.int64), "weights": tensor(weights)}
    given = types.Datum(model_input=types.ModelInput.from_ints([300, 301, 303]), loss_fn_inputs=inputs)
    output = wait(user.train(seed=1).forward_backward([given], "cross_entropy"))
    lp = logprobs_of(output)
    assert lp.shape == targets.shape
    assert close(output.metrics["loss:sum"], -(weights * lp).sum())


@feature(GROUP, "Sparse (CSR) targets and weights.", needs=("types.TensorData(sparse_crow_indices)",))
def sparse_targets(user: User) -> None:
    def sparse(values: list[Any], dtype: Any) -> types.TensorData:
        csr: dict[str, Any] = {"sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [1, 0, 1]}
        return types.TensorData(data=values, dtype=dtype, shape=[3, 2], **csr)

    inputs = {"target_tokens": sparse([302, 305, 306], "int64"), "weights": sparse([1.0, 2.0, 3.0], "float32")}
    given = types.Datum(model_input=types.ModelInput.from_ints([300, 301, 303]), loss_fn_inputs=inputs)
    output = wait(user.train(seed=1).forward_backward([given], "cross_entropy"))
    dense = {
        "target_tokens": tensor([[0, 302], [0, 0], [305, 306]], np.int64),
        "weights": tensor([[0, 1.0], [0, 0], [2.0, 3.0]]),
    }
    full = types.Datum(model_input=types.ModelInput.from_ints([300, 301, 303]), loss_fn_inputs=dense)
    expected = wait(user.train(seed=1).forward_backward([full], "cross_entropy"))
    assert close(output.metrics["loss:sum"], expected.metrics["loss:sum"])


@feature(GROUP, "`forward_backward_custom`: a loss of one's own in torch has the gradient of the built-in one.")
def custom_loss(user: User) -> None:
    def negative(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = -sum(lp.sum() for lp in logprobs)
        return loss, {"mine": float(loss) / len(data)}

    built_in, custom, twin = (user.train(seed=9) for _ in range(3))
    expected = wait(built_in.forward_backward(user.data, "cross_entropy")).metrics["loss:sum"]
    first = wait(custom.forward_backward_custom(user.data, negative))
    second = wait(twin.forward_backward_custom_async(user.data, negative))
    for output in (first, second):
        assert close(output.metrics["mine"], expected)
    for trainer in (built_in, custom, twin):
        wait(trainer.optim_step(types.AdamParams(learning_rate=5e-3)))
    assert same(user.scores(built_in), user.scores(custom), 1e-5)
    assert same(user.scores(built_in), user.scores(twin), 1e-5)


def reinforce(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/tokens:sum": (weights != 0).sum()}


def preference(logprobs: Any, rejected: Any, beta: Any) -> tuple[Any, dict[str, Any]]:
    """As DPO: a pair's other answer was scored before."""
    margin = beta * (logprobs.mean() - rejected.mean())
    return -margin.sigmoid().log(), {"custom/margin:mean": margin, "custom/accuracy:mean": (margin > 0).float()}


def masked(logprobs: Any, weights: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
    """It mixes the entries of a datum."""
    chosen = logprobs[weights > 0]
    ratio = (chosen - chosen.detach()).exp()
    loss = (logprobs[1:] - logprobs[:-1]).square().mean() - (ratio * advantages).sum() / weights.sum()
    return loss, {"custom/top:mean": chosen.max()}


@feature(
    GROUP,
    "A custom loss created once and run on the server has the numbers of the client, in one pass, and of its forward.",
    needs=("ServiceClient.create_custom_loss",),
)
def created_custom_loss(user: User) -> None:
    count = len(user.tokens) - 1
    data = []
    for length in (count, count - 3, count - 5):
        inputs = {"weights": np.arange(length) % 2, "advantages": [0.5], "rejected": [-3.0, -4.0], "beta": 0.3}
        given = datum(user.tokens[: length + 1], **inputs)
        spans: Any = [types.SampledProvenanceSpan(sequence_id="q", length=length)]
        data.append(given.with_provenance(spans, spans))
    ranks = {"logprobs": 1, "weights": 1, "advantages": 1, "rejected": 1, "beta": 0}
    trained = [user.train(seed=9) for _ in range(2)]
    for loss in (reinforce, preference, masked):
        takes = loss.__code__.co_varnames[: loss.__code__.co_argcount]
        handle = wait(user.service.create_custom_loss(loss, {name: ranks[name] for name in takes}))
        assert handle.loss_id is not None
        before = user.asked("POST /api/v1/forward_backward")
        server = wait(trained[0].forward_backward_custom(data, handle))
        assert user.asked("POST /api/v1/forward_backward") == before + 1
        client = wait(trained[1].forward_backward_custom(data, dataclasses.replace(handle, loss_id=None)))
        forward = wait(trained[0].forward(data, "custom", {"loss_id": handle.loss_id}))
        for output in (server, forward):
            for name in (*(name for name in client.metrics if name.startswith("custom/")), "loss:sum"):
                assert close(output.metrics[name], client.metrics[name], 1e-5), (loss.__name__, name)
            assert all(same(logprobs_of(output, n), logprobs_of(client, n), 1e-5) for n in range(3))
        for trainer in trained:
            wait(trainer.optim_step(types.AdamParams(learning_rate=5e-3)))
        one, other = (user.scores(trainer) for trainer in trained)
        assert same(one, other, 1e-5)


@feature(GROUP, "A wrong request fails with its field named, and the model goes on.")
def failed_pass(user: User) -> None:
    trainer = user.train()
    failing = trainer.forward_backward([datum([1, 2, 99_999])], "cross_entropy")
    following = trainer.forward_backward(user.data, "cross_entropy")
    assert "99999" in refusal(lambda: failing)
    assert wait(following).metrics["loss:sum"] > 0
