"""The Tinker operations of `skyrl capacity`, as one HTTP client each, without the SDK; each is timed.

Knows the protocol of training and sampling. Does not know what is measured with it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from skyrl import __version__

REQUEST_S = 60.0
"""Longer than a server holds a poll."""


class Failed(RuntimeError):
    """The server refused an operation, or it failed; or the time is over."""


class OutOfTime(Failed):
    """The time is over."""


class Clock:
    """The time that all of it may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raises OutOfTime when the time is over."""
        if self.left_s <= 0:
            raise OutOfTime("the time of --minutes is over: give more")


class Times:
    """Seconds of each operation, by name. Only what runs alone is counted: see `counting`."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[float]] = defaultdict(list)
        self.counting = True

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.counting:
            self.of[name].append(time.perf_counter() - began)


class Tenant:
    """One tenant with a key and a session of its own, who trains one adapter and samples from its newest version."""

    def __init__(self, url: str, number: int, base_model: str, clock: Clock, times: Times) -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"X-API-Key": f"tml-capacity-{number}"}
        self._http = httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False, limits=limits)
        self._base_model, self._clock, self._times = base_model, clock, times
        self._orders, self._samples, self._saves = itertools.count(1), itertools.count(), itertools.count()
        self._draw = random.Random(number)
        self._model = self.sampler = ""
        body = {"sdk_version": f"skyrl {__version__}", "tags": ["capacity"], "user_metadata": {}}
        self._session = self._post("create_session", body)["session_id"]

    def close(self) -> None:
        """End the session, and with it the adapter in training, while there is time. A server that is gone has ended
        it, too."""
        with suppress(Failed):
            self._ask(f"sessions/{self._session}/finish", {})
        self._http.close()

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a route; with a result to wait for, that result."""
        answer = self._ask(path, {**body, "type": path})
        while "request_id" in answer:
            outcome = self._ask("retrieve_future", {"request_id": answer["request_id"]})
            if outcome.get("type") != "try_again":
                if "error" in outcome:
                    raise Failed(f"{path}: {outcome['error']}")
                return outcome
        return answer

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._clock.check()
        try:
            answer = self._http.post(f"/{path}", json=body, timeout=min(REQUEST_S, max(0.01, self._clock.left_s)))
        except httpx.TransportError as error:
            self._clock.check()
            raise Failed(f"{path}: {error or type(error).__name__}") from error
        content = answer.json()
        if answer.is_error and answer.status_code != httpx.codes.REQUEST_TIMEOUT:
            raise Failed(f"{path}: status {answer.status_code}: {content.get('detail')}")
        return content

    def create(self, rank: int) -> None:
        """Create the adapter that all later operations are about."""
        body = {"session_id": self._session, "model_seq_id": 0, "base_model": self._base_model}
        with self._times.timed("create_model"):
            made = self._post("create_model", body | {"lora_config": {"rank": rank, "seed": 0}})
        self._model = made["model_id"]

    def _order(self, path: str, /, **body: Any) -> dict[str, Any]:
        return self._post(path, {"model_id": self._model, "seq_id": next(self._orders), **body})

    def tokens(self, count: int, vocabulary: int) -> list[int]:
        """Ids of the second quarter of the vocabulary, where no special tokens are."""
        return [self._draw.randrange(vocabulary // 4, vocabulary // 2) for _ in range(count)]

    def train(self, rows: Sequence[Sequence[int]], name: str = "forward_backward") -> None:
        """A pass over sequences, all of whose tokens but the first are trained; with the name `forward` no gradient."""
        data = [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": row[:-1]}]},
                "loss_fn_inputs": {
                    "target_tokens": _tensor("int64", row[1:]),
                    "weights": _tensor("float32", [1.0] * (len(row) - 1)),
                },
            }
            for row in rows
        ]
        with self._times.timed(name):
            self._order(name, **{f"{name}_input": {"data": data, "loss_fn": "cross_entropy"}})

    def step(self) -> None:
        with self._times.timed("optim_step"):
            self._order("optim_step", adam_params={"learning_rate": 1e-5})

    def step_of(self, rows: Sequence[Sequence[int]]) -> None:
        """A pass and the step that follows it."""
        self.train(rows)
        self.step()

    def save(self) -> None:
        """The next version, which the tenant's samples take from now on."""
        with self._times.timed("save_weights_for_sampler"):
            saved = self._order("save_weights_for_sampler", sampling_session_seq_id=next(self._saves))
        self.sampler = saved["sampling_session_id"]

    def save_and_load(self, name: str) -> None:
        """A checkpoint of the training state, and back."""
        with self._times.timed("save_weights"):
            path = self._order("save_weights", path=name)["path"]
        with self._times.timed("load_weights"):
            self._order("load_weights", path=path, optimizer=True)

    def sample(self, prompt: Sequence[int], max_tokens: int, name: str = "sample") -> int:
        """The number of sampled tokens."""
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": next(self._samples),
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "stop": []},
        }
        with self._times.timed(name):
            sampled = self._post("asample", body)
        return sum(len(sequence["tokens"]) for sequence in sampled["sequences"])


def _tensor(dtype: str, data: Sequence[float]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [len(data)], "data": list(data)}


def kept_busy(workers: Sequence[Callable[[], float]], seconds: float) -> list[float]:
    """Each worker is called again and again by a thread of its own, for so many seconds, and its results are summed. A
    call that is running then is waited for and counts with the part of it that lay before. Raises what a worker
    raises."""
    end = time.monotonic() + seconds

    def repeat(worker: Callable[[], float]) -> float:
        total = 0.0
        while (began := time.monotonic()) < end:
            done = worker()
            total += done * min(1.0, (end - began) / max(time.monotonic() - began, 1e-9))
        return total

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(repeat, workers))
