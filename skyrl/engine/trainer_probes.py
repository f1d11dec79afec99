"""What the trainer computes for the comparison with the sampler: random adapters, saved, and logprobs with each; and
whether the sampler's logprobs of the same tokens agree.

One adapter for each kind of layer that adapters train, on that kind alone, and one on all kinds. A prompt with a
picture is compared too: another vision tower, image processor or order of positions would change the logprobs of the
text behind the picture. Agreement is judged by medians, because single positions may differ much where nothing is
wrong: rounding decides which of two nearly equal experts a router chooses.

Knows no architecture: the kinds of layers are the backend's. Knows nothing of the sampler. Changes no row of the
database.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from skyrl.base.adapter_files import TRAIN_FLAGS, kinds_of, with_flags
from skyrl.base.config.server import ServerConfig
from skyrl.base.pictures.picture import PlacedPicture, digest_of
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.engine.file_scope import new_probe
from skyrl.storage.checkpoint_store.base import CheckpointStore, StoreError
from skyrl.storage.checkpoint_store.directories import atomic_directory, remove
from skyrl.storage.checkpoint_store.versions import version_directory, version_key
from skyrl.trainer.protocol import Backend, Datum, TrainingPass

Logprobs = npt.NDArray[np.float32]
"""One for each token of the probe but the first."""

BASE_PART, BASE_FLOOR = 0.5, 0.02
"""How far the base model's logprobs may be apart, as a part of how much they vary over tokens; and in nats."""
NOISE_FACTOR, LEAST_PART, LARGEST_PART = 5.0, 0.25, 0.75
"""How far two changes may be apart: five times what the base model's logprobs are apart, but at least and at most these
parts of the trainer's change. A sampler that ignores an adapter is apart by the whole change, one that adds something
unrelated by more."""
DECIDING_FACTOR = 3.0
"""A change below so many times the base model's difference proves nothing."""
IGNORED_PART = 0.05
"""Only in words: a sampler's change below this part of the trainer's is called none."""


def median_size(values: npt.NDArray[np.floating]) -> float:
    """The median of the absolute values."""
    return float(np.median(np.abs(values)))


@dataclass(frozen=True)
class BaseAgreement:
    """The base model's logprobs in both. `difference` and `allowed` are medians over tokens, in nats."""

    difference: float
    largest: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed  # False for NaN


def compare_base(trainer: Logprobs, sampler: Logprobs) -> BaseAgreement:
    return _agreement(sampler - trainer, BASE_PART * median_size(trainer - np.median(trainer)))


def compare_seen(trainer: Logprobs, sampler: Logprobs, base: BaseAgreement) -> BaseAgreement:
    """The base model's logprobs of the text behind a picture. They may be apart by a few times what those of text alone
    are apart: a picture changes logprobs less than other weights do."""
    return _agreement(sampler - trainer, NOISE_FACTOR * base.difference)


def _agreement(apart: npt.NDArray[np.floating], allowed: float) -> BaseAgreement:
    return BaseAgreement(median_size(apart), float(np.max(np.abs(apart))), max(allowed, BASE_FLOOR))


@dataclass(frozen=True)
class ChangeAgreement:
    """What an adapter changes in both: medians over tokens of the absolute changes, and of their difference."""

    in_trainer: float
    in_sampler: float
    difference: float
    allowed: float
    decides: bool
    """Whether the trainer's change is far enough above the base model's difference to prove something."""

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed  # False for NaN

    @property
    def is_ignored(self) -> bool:
        """Whether the sampler does as if there were no adapter, up to rounding."""
        return self.in_sampler <= IGNORED_PART * self.in_trainer

    @property
    def part(self) -> float:
        """How much of the change is the same: 1 if all is, 0 for an adapter that is ignored."""
        return 1 - self.difference / self.in_trainer if self.in_trainer else 1.0


def compare_change(
    trainer_base: Logprobs, trainer: Logprobs, sampler_base: Logprobs, sampler: Logprobs
) -> ChangeAgreement:
    """`trainer` and `sampler` are the logprobs with the adapter."""
    noise = median_size(sampler_base - trainer_base)
    expected, got = trainer - trainer_base, sampler - sampler_base
    change = median_size(expected)
    allowed = min(max(NOISE_FACTOR * noise, LEAST_PART * change), LARGEST_PART * change)
    return ChangeAgreement(
        change, median_size(got), median_size(got - expected), allowed, change > DECIDING_FACTOR * noise
    )


PICTURE_COLUMNS, PICTURE_ROWS = 3, 2
"""Tokens of the picture, before the image processor resizes it."""


@dataclass(frozen=True)
class PicturePrompt:
    """`before` and `behind`: int64, the text around the picture. `picture`: its place. `file`: a PNG."""

    before: npt.NDArray[np.int64]
    behind: npt.NDArray[np.int64]
    picture: PlacedPicture
    file: bytes
    image_token_id: int

    @classmethod
    def of(cls, sight: VisionConfig, text: npt.NDArray[np.int64], max_context: int) -> PicturePrompt | None:
        """The same picture at each start, of random numbers, between the halves of the text. None if it has more tokens
        than the context has room for."""
        width, height = PICTURE_COLUMNS * sight.patch * sight.merge, PICTURE_ROWS * sight.patch * sight.merge
        tokens = sight.tokens(width, height)
        if len(text) + tokens >= max_context:
            return None
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        before, behind = np.array_split(text, 2)
        placed = PlacedPicture(len(before), tokens, digest_of(file.getvalue()), "png")
        return cls(before, behind, placed, file.getvalue(), sight.image_token_id)

    @property
    def datum(self) -> Datum:
        """Its targets are the tokens that follow."""
        image = np.full(self.picture.tokens, self.image_token_id)
        tokens = np.concatenate([self.before, image, self.behind])
        return Datum(tokens[:-1], {"target_tokens": tokens[1:]}, (self.picture,))

    @property
    def token_ids(self) -> list[int]:
        """As vLLM takes them: one token stands for the picture."""
        return [*self.before.tolist(), self.image_token_id, *self.behind.tolist()]


logger = logging.getLogger(__name__)

TOKENS = 64
RANK, SEED = 2, 20
TARGET_CHANGE, NEAR = 1.0, 3.0
"""The change of logprobs, in nats, to which updates are sized: far above rounding, and small enough to leave a working
model. A change within this factor of it is taken."""
LEAST_CHANGE = 1e-9
TRIES, LARGEST_STEP = 4, 30.0
"""How often an update is sized anew, and by which factor at most. Some layers change little however large they are."""


@dataclass(frozen=True)
class Probe:
    """One saved adapter, and the trainer's logprobs with it."""

    layers: str
    """Its layers, for people."""
    adapter: AdapterVersion
    logprobs: Logprobs


@dataclass(frozen=True)
class Expected:
    """What the trainer has computed: logprobs of `tokens`, int64 [N], with the base model and with each probe. `seen`:
    with the base model, of the text behind the picture in `picture`; None for a model that takes none."""

    tokens: npt.NDArray[np.int64]
    base: Logprobs
    probes: Sequence[Probe]
    picture: PicturePrompt | None = None
    seen: Logprobs | None = None


def probe_tokens(vocab_size: int, max_context: int) -> npt.NDArray[np.int64]:
    """The same tokens at each start. They are from the middle of the vocabulary: tokens that stand for pictures or for
    turns of a chat are at its ends. One place of the context is left for the token that vLLM must generate."""
    rng = np.random.default_rng(SEED)
    return rng.integers(vocab_size // 8, max(vocab_size // 2, 1), min(TOKENS, max_context - 1))


class TrainerProbes:
    """Lets the trainer compute and save what a sampler is compared with. Must run before any model is created."""

    def __init__(self, config: ServerConfig, backend: Backend, store: CheckpointStore) -> None:
        self._config = config
        self._backend = backend
        self._store = store
        self._model_id = new_probe(config.role)
        self._tokens = probe_tokens(backend.limits.vocab_size, backend.limits.max_context)
        sight, context = backend.limits.sight, backend.limits.max_context
        self._picture = None if sight is None else PicturePrompt.of(sight, self._tokens, context)
        self._base: Logprobs = np.zeros(0, np.float32)
        self._probes: list[Probe] = []

    def run(self) -> Expected:
        """To be called on the backend thread. Raises the backend's errors, OSError and StoreError."""
        if self._config.full_finetuning:
            whole = LoraSpec(0, self._config.backend_config.lora.alpha, SEED)
            with self._model(whole):
                return self._run_base()
        kinds = {flag: kinds_of(self._backend.layers_of(self._spec({flag}))) for flag in TRAIN_FLAGS}
        trained = [flag for flag in TRAIN_FLAGS if kinds[flag]]
        with self._model(self._spec(trained)):
            expected = self._run_base()
        for flag in trained:
            for kind in kinds[flag]:
                self._add(kind, self._spec({flag}), [kind])
        self._add("all layers", self._spec(trained), [kind for flag in trained for kind in kinds[flag]])
        return expected

    def _run_base(self) -> Expected:
        """What is expected of the base model; the probes are added later."""
        self._base, seen = self._logprobs(), None
        if (prompt := self._picture) is not None:
            files = {prompt.picture.digest: prompt.file}
            seen = self._logprobs_of(prompt.datum, files)[-len(prompt.behind) :]
        return Expected(self._tokens, self._base, self._probes, self._picture, seen)

    def remove(self) -> None:
        """Delete the files of all probes. A failure is logged: the sweeper deletes adapters that nobody uses."""
        try:
            for probe in self._probes:
                if self._config.weights_travel:
                    self._store.delete(version_key(probe.adapter))
                else:
                    directory = version_directory(self._config.state_dir, probe.adapter)
                    remove(directory)
                    with contextlib.suppress(OSError):  # others of this start are in it
                        directory.parent.rmdir()
        except (OSError, StoreError) as error:
            logger.warning("the adapters of the comparison with vLLM could not be deleted yet: %s", error)

    def _add(self, layers: str, spec: LoraSpec, kinds: Collection[str]) -> None:
        """Save an adapter on these kinds of layers, of the size that changes logprobs about as wanted."""
        adapter = AdapterVersion.of(self._model_id, len(self._probes) + 1)
        best: tuple[float, float] | None = None
        of_update = 0.5 * spec.rank**0.5 / spec.alpha  # an update's output is then about half of its layer's own
        for _ in range(TRIES):
            with self._model(spec, kinds, of_update):
                logprobs = self._logprobs()
                change = max(median_size(logprobs - self._base), LEAST_CHANGE)
                away = abs(math.log(change / TARGET_CHANGE))
                if away <= math.log(NEAR):
                    self._save(layers, adapter, logprobs)
                    return
            best = min(best or (away, of_update), (away, of_update))
            of_update *= min(max(TARGET_CHANGE / change, 1 / LARGEST_STEP), LARGEST_STEP)
        assert best is not None
        with self._model(spec, kinds, best[1]):
            self._save(layers, adapter, self._logprobs())

    def _save(self, layers: str, adapter: AdapterVersion, logprobs: Logprobs) -> None:
        """Save the model's adapter where saves write this version: see `Saves.for_sampler`."""
        if self._config.weights_travel:
            writing = self._store.writing(version_key(adapter))
        else:
            writing = atomic_directory(version_directory(self._config.state_dir, adapter))
        with writing as directory:
            self._backend.save_adapter(self._model_id, directory, dtype=self._config.adapter_dtype)
        self._probes.append(Probe(layers, adapter, logprobs))

    def _spec(self, flags: Collection[str]) -> LoraSpec:
        lora = self._config.backend_config.lora
        return with_flags(LoraSpec(min(RANK, lora.max_lora_rank), lora.alpha, SEED), flags)

    @contextmanager
    def _model(self, spec: LoraSpec, kinds: Collection[str] = (), of_update: float = 0.0) -> Iterator[None]:
        self._backend.create_probe(self._model_id, spec, kinds, of_update)
        try:
            yield
        finally:
            self._backend.delete_model(self._model_id)

    def _logprobs(self) -> Logprobs:
        return self._logprobs_of(Datum(self._tokens[:-1], {"target_tokens": self._tokens[1:]}), {})

    def _logprobs_of(self, datum: Datum, files: Mapping[str, bytes]) -> Logprobs:
        run = TrainingPass(self._model_id, [datum], "cross_entropy", backward=False, files=files)
        (outcome,) = self._backend.run([run])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome.logprobs[0]
