"""Samples that an API process forwards, and OpenAI requests: how many ended and how, their tokens, their images, and
where their time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl.runtime.metrics.tallies import CANCELLED, OK, OUTCOMES, Spreads, Tallies

DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
OVERHEAD_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10)
Refusal = Literal["full", "bytes", "quota", "share", "stopping"]
REFUSALS: tuple[Refusal, ...] = ("full", "bytes", "quota", "share", "stopping")
EVENTS = (
    "not_accepted",
    "upstream_busy",
    "upstream_away",
    "upstream_error",
    "interrupted",
    "aborted",
    "refused",
    "malformed",
    "missing_logprobs",
    "adapter_reloads",
    "other_weights",
    "replaced_weights",
    "changed_weights",
)
"""The counters of `skyrl.sampling.client`."""


class Used(msgspec.Struct):
    """Numbers of tokens that a request has used.

    `prompt_tokens` counts the prompt once, however many sequences were sampled. `cached_tokens` is the part of the
    prompt that came from the prefix cache, 0 if the server does not report it. `sampled_tokens` is the sum over all
    sequences. `computed_again` are prompt tokens that were computed for several sequences: all but the first time, 0 if
    the server does not report it.

    `samples` are the sequences, of which `truncated` ended at their bound of tokens. `surprise` is the sum of -logprob
    of `surprise_tokens` tokens that were drawn at random; both are 0 if logprobs are not known.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    computed_again: int = 0
    samples: int = 0
    truncated: int = 0
    surprise: float = 0.0
    surprise_tokens: int = 0


class RefusalMetrics:
    """Samples that were not accepted, of all base models together: a sample may be refused before its base model is
    known. With the reason `share`, passes, turns and sessions count, too. Call `refused` on one thread."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Samples that were not accepted, and all requests that the `share` of a tenant has refused."
        self._refused = Tallies(registry, "skyrl_samples_refused", about, "reason", REFUSALS)

    def refused(self, reason: Refusal) -> None:
        self._refused[reason].add()


class SampleMetrics:
    """The samples of one base model. Call all methods on one thread."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry
        outcomes = Tallies(registry, "skyrl_samples", "Samples that ended.", "outcome", OUTCOMES)
        self._ended = {outcome: outcomes[outcome] for outcome in OUTCOMES}
        tokens = Tallies(
            registry,
            "skyrl_sample_tokens",
            "Tokens of samples that succeeded. `prompt` includes `prompt_cached`, the part from the prefix cache. "
            "`prompt_computed` counts what was computed for each sequence of a sample.",
            "kind",
            ("prompt", "prompt_cached", "prompt_computed", "sampled"),
        )
        self._prompt, self._cached, self._sampled = tokens["prompt"], tokens["prompt_cached"], tokens["sampled"]
        self._computed = tokens["prompt_computed"]
        about = "Time from a sample's record to its stored outcome, and of an OpenAI request in the server."
        self._duration = Spreads(registry, "skyrl_sample_duration_seconds", about, DURATION_BOUNDS).only
        about = "The part of a successful sample's time that was spent neither in vLLM nor waiting for its quota."
        self._overhead = Spreads(registry, "skyrl_sample_overhead_seconds", about, OVERHEAD_BOUNDS).only
        self._in_flight: list[Ages] = []
        self._held_back: list[Callable[[], int]] = []
        if registry is not None:
            registry.register(_InFlight(self._in_flight, self._held_back))

    def succeeded(self, used: Used) -> None:
        """Count the tokens of a sample that vLLM has answered."""
        self._computed.value += used.prompt_tokens - used.cached_tokens + used.computed_again
        self._prompt.value += used.prompt_tokens
        self._cached.value += used.cached_tokens
        self._sampled.value += used.sampled_tokens

    def ended(self, outcome: str, seconds: float, overhead_s: float | None = None) -> None:
        """Count a sample that has its outcome. `overhead_s` is None if it has no meaning."""
        self._ended[outcome].value += 1
        self._duration.add(seconds)
        if outcome == OK and overhead_s is not None:
            self._overhead.add(max(0.0, overhead_s))

    def cancelled(self) -> None:
        self._ended[CANCELLED].add()

    def watch(self, ages: Ages) -> None:
        """Count these as in flight, too. They are asked at each scrape, on another thread."""
        self._in_flight.append(ages)

    def watch_held_back(self, waiting: Callable[[], int]) -> None:
        """Count these as held back, too: asked at each scrape, on another thread."""
        self._held_back.append(waiting)

    def watch_events(self, events: Callable[[], Mapping[str, int]]) -> None:
        """Also show these counters, asked at each scrape on another thread."""
        if self._registry is not None:
            self._registry.register(_Events(events))


class Ages:
    """When each request in flight began, by its id."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._began)

    def begin(self, request_id: str, at: float) -> None:
        """`at` is a time of `time.perf_counter`."""
        self._began[request_id] = at

    def end(self, request_id: str) -> None:
        self._began.pop(request_id, None)

    def oldest_began(self) -> float:
        """The present without requests. `min` over a dictionary's values holds the interpreter's lock from begin to
        end, so other threads may call this."""
        return min(self._began.values(), default=time.perf_counter())


class _InFlight(Collector):
    def __init__(self, ages: list[Ages], held_back: list[Callable[[], int]]) -> None:
        self._ages = ages
        self._held_back = held_back

    def collect(self) -> Iterable[Metric]:
        in_flight = sum(map(len, self._ages))
        yield GaugeMetricFamily("skyrl_samples_in_flight", "Samples that are forwarded now.", value=float(in_flight))
        waiting = sum(held_back() for held_back in self._held_back)
        about = "Samples and OpenAI requests that wait to be sent: the inference server has as many as it is given."
        yield GaugeMetricFamily("skyrl_samples_held_back", about, value=float(waiting))
        now = time.perf_counter()
        oldest_s = max((now - ages.oldest_began() for ages in self._ages), default=0.0)
        about = "Age of the oldest sample in flight; 0 without one."
        yield GaugeMetricFamily("skyrl_samples_oldest_seconds", about, value=max(0.0, oldest_s))


class _Events(Collector):
    def __init__(self, events: Callable[[], Mapping[str, int]]) -> None:
        self._events = events

    def collect(self) -> Iterable[Metric]:
        about = "Trouble with the inference server; docs/how-it-works/forwarding.md explains each kind."
        family, counted = CounterMetricFamily("skyrl_forwarding_events", about, labels=("event",)), self._events()
        for event in EVENTS:
            family.add_metric((event,), counted.get(event, 0))
        yield family


CHECK_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class ImageMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Different images of each request."
        images = Counter("skyrl_images", about, ["outcome"], registry=registry)
        self._stored, self._known, self._faulty = (images.labels(each) for each in ("stored", "known", "faulty"))
        self._waiting = Gauge("skyrl_images_in_check", "Images that are checked or wait for it.", registry=registry)
        about = "Time of one check, with the wait for its turn."
        self._seconds = Histogram("skyrl_image_check_seconds", about, buckets=CHECK_BOUNDS, registry=registry)

    def taken(self, stored: int, known: int, faulty: int) -> None:
        """The images of one request: new files, files that were stored before, and files that are no images."""
        self._stored.inc(stored)
        self._known.inc(known)
        self._faulty.inc(faulty)

    @contextmanager
    def check(self) -> Generator[None]:
        began = time.perf_counter()
        self._waiting.inc()
        try:
            yield
        finally:
            self._waiting.dec()
            self._seconds.observe(time.perf_counter() - began)
