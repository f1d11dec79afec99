"""A way of `benchmarks.trainer` through a whole server: the Tinker SDK, the API, the engine and its backend.

The server would forward samples to a null upstream, so no vLLM runs. Every tenant has an API key of its own, and all
tenants submit their pass and their step before anyone waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tinker
from tinker import types

from benchmarks.processes import parts_of
from benchmarks.stage import NullUpstream, ready_server
from benchmarks.trainer_rows import TenantPass
from benchmarks.trainer_ways import BUDGET, COMPUTED, STEP, Trained, joined
from skyrl.trainer.protocol import Datum


class ServerWay:
    """`merge`: passes that wait at the same time share the base model's work."""

    def __init__(self, model: str, threads: int, *, merge: bool) -> None:
        self._model = model
        self._stack = ExitStack()
        upstream = self._stack.enter_context(NullUpstream())
        flags = ("--external-inference-url", upstream.url, "--base-model", model)
        settings = {"trainer.merge_passes": merge, "trainer.micro_batch_tokens": BUDGET}
        self._server = self._stack.enter_context(ready_server(*flags, engine=settings, threads=threads))

    def start(self, passes: Sequence[TenantPass]) -> None:
        self.take(passes)
        self._clients: list[Any] = []
        for number, each in enumerate(passes):
            service = tinker.ServiceClient(base_url=self._server.url, api_key=f"tml-tenant-{number}")
            self._stack.enter_context(service)
            client = service.create_lora_training_client(base_model=self._model, rank=each.rank, seed=number)
            self._clients.append(client.result())

    def take(self, passes: Sequence[TenantPass]) -> None:
        self._data = [(each.loss_fn, [[_sdk_datum(datum) for datum in data] for data in each.parts]) for each in passes]

    def step(self) -> list[Trained]:
        adam = types.AdamParams(learning_rate=STEP.learning_rate, eps=STEP.eps)
        submitted = [
            ([client.forward_backward(data, loss_fn) for data in parts], client.optim_step(adam))
            for client, (loss_fn, parts) in zip(self._clients, self._data, strict=True)
        ]
        found: list[Trained] = []
        for training_passes, step in submitted:
            found.append(joined([_trained(each.result()) for each in training_passes]))
            step.result()
        return found

    def pids(self) -> list[int]:
        return list(parts_of(self._server.pid).values())

    def close(self) -> None:
        self._stack.close()


def _trained(result: Any) -> Trained:
    logprobs = [np.asarray(each["logprobs"].data, np.float32) for each in result.loss_fn_outputs]
    return Trained(result.metrics["loss:sum"], np.concatenate(logprobs), result.metrics[COMPUTED])


def _sdk_datum(datum: Datum) -> types.Datum:
    inputs = {name: types.TensorData.from_numpy(value) for name, value in datum.loss_inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens.tolist()), loss_fn_inputs=inputs)
