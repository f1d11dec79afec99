"""The models of a tenant: the base model under its served names, and the checkpoints that the tenant can sample from.

Knows names, checkpoints and their weights. Sends nothing: the inference server's own list has the adapters of all
tenants and the places of their files, and is never shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.weights import BaseWeights, FullWeights, WeightsRef, served_version
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.paths import parse_path
from skyrl.chat.openai.errors import OpenAIError, model_not_found
from skyrl.sampling.base_model import served_name
from skyrl.sampling.servers import CurrentWeightsCheck
from skyrl.storage.db.checkpoints import Checkpoint, Checkpoints, Seen

RUN = "tinker://"
MAX_LISTED = 1000
"""Checkpoints in the list, the newest ones. OpenAI's list has no pages; any other checkpoint is found by its name."""


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that a request asks for. `name` is the caller's name for them, `served_name` the inference server's.
    `created_at` is in seconds since the epoch. An answer must begin with the weights that the inference server calls
    `version`; None if it never changes them. `number` is that of the base model in the server."""

    name: str
    served_name: str
    base_model: str
    weights: WeightsRef
    created_at: float = 0.0
    version: str | None = None
    number: int = 0

    @property
    def description(self) -> dict[str, Any]:
        """The model as `models` shows it."""
        described = {"id": self.name, "object": "model", "created": int(self.created_at), "owned_by": "skyrl"}
        return described if isinstance(self.weights, BaseWeights) else described | {"parent": self.base_model}


@dataclass(frozen=True)
class Base:
    """A base model under its names. `paths` are names that clients may use, and that are not listed. `current_weights`
    is None if the inference server never changes its weights."""

    served_names: tuple[str, ...]
    paths: tuple[str, ...]
    limits: Callable[[], ContextLimits]
    current_weights: CurrentWeightsCheck | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, in requests and in checkpoints."""
        return (*self.served_names, *self.paths)

    def own(self) -> list[dict[str, Any]]:
        """The descriptions of the base model itself, one for each served name."""
        length = self.limits().max_context
        served = [Target(name, name, name, BaseWeights()).description for name in self.served_names]
        return served if length is None else [model | {"max_model_len": length} for model in served]

    def target(self, name: str, saved: Checkpoint, number: int) -> Target:
        """A checkpoint of this base model. Raises OpenAIError."""
        assert saved.weights is not None
        return replace(self.target_of(name, saved.base_model, saved.weights, number), created_at=saved.created_at)

    def target_of(self, name: str, base_model: str, weights: WeightsRef, number: int) -> Target:
        """Weights of this base model, which has the name `base_model` where they are stored. Raises OpenAIError."""
        try:
            full = self.current_weights is not None
            served = served_name(weights, self.served_names[0], "model", full_finetuning=full)
        except RequestError as error:
            raise _refused(str(error)) from error
        return Target(name, served, base_model, weights, version=self.version(weights), number=number)

    def version(self, weights: WeightsRef) -> str | None:
        return None if self.current_weights is None else served_version(weights)


class ModelNames:
    """Finds the weights behind a name: a served name, `tinker://...` or `BASE;tinker://...`."""

    def __init__(self, bases: Sequence[Base], checkpoints: Checkpoints) -> None:
        self._bases = tuple(bases)
        self._checkpoints = checkpoints

    async def find(self, name: str | None, tenant: str) -> Target:
        """`name` None is the only base model. Raises OpenAIError: 404 for what does not exist for this tenant, and for
        weights that are not loaded any more; 400 for a checkpoint of another base, and without a name on a server of
        several base models."""
        return await self._checked(await self._find(self._only() if name is None else name, tenant))

    def _only(self) -> str:
        """The first name of the only base model. Raises OpenAIError."""
        names = [name for base in self._bases for name in base.served_names]
        if len(self._bases) > 1:
            raise _refused(f"model: is missing; there is: {', '.join(names)}")
        return names[0]

    async def _checked(self, target: Target) -> Target:
        """Raises OpenAIError 404 for weights that were replaced."""
        current_weights = self._bases[target.number].current_weights
        if current_weights is not None and (replaced := await current_weights.replaced(target.weights)) is not None:
            raise OpenAIError(replaced, status=404, param="model", code="model_not_found")
        return target

    async def newest(self, name: str, tenant: str) -> Target:
        """As `find`, and `tinker://<run>` stands for the newest sampler weights that the run has saved. Raises
        OpenAIError."""
        run = name.removeprefix(RUN)
        if run == name or not run or "/" in run:
            return await self.find(name, tenant)
        saved = await self._checkpoints.latest([run], tenant, Seen(kinds=("sampler_weights",)))
        if not saved:
            raise model_not_found(name)
        return replace(await self.find(str(saved[0].path), tenant), name=name)

    async def of_weights(self, base_model: str, weights: WeightsRef, name: str) -> Target:
        """The weights that were found earlier, under the name that the caller gives them. Raises OpenAIError if they
        are not served any more."""
        number = self._number(base_model)
        if number is None:
            raise _refused(f"{base_model!r} is not served here any more")
        return await self._checked(self._bases[number].target_of(name, base_model, weights, number))

    async def _find(self, name: str, tenant: str) -> Target:
        for number, base in enumerate(self._bases):
            if name in base.served_names:
                weights = BaseWeights()
                version = base.version(weights)
                return Target(name, base.served_names[0], name, weights, version=version, number=number)
        named, separator, path = name.rpartition(";")
        try:
            saved = await self._checkpoints.find(parse_path(path, "model"), tenant)
        except RequestError:
            saved = None
        if saved is None or saved.weights is None:
            raise model_not_found(name)
        number = self._number(saved.base_model)
        if number is None:
            raise _refused(f"{path} was trained from {saved.base_model!r}, which is not served here")
        if separator and self._number(named) != number:
            raise _refused(f"{named!r} is not the model that {path} was trained from")
        return self._bases[number].target(name, saved, number)

    def served(self) -> list[dict[str, Any]]:
        """The served names."""
        return [description for base in self._bases for description in base.own()]

    def any_name(self, name: str) -> dict[str, Any]:
        """The model of an agent session, under the name by which the agent asks for it."""
        return Target(name, name, name, BaseWeights()).description

    async def listed(self, tenant: str) -> list[dict[str, Any]]:
        """The served names, and the tenant's own newest checkpoints. Published ones are found by their names."""
        own, _ = await self._checkpoints.page(tenant, MAX_LISTED, 0, Seen(kinds=("sampler_weights",)))
        return self.served() + [target.description for saved in own if (target := self._usable(saved)) is not None]

    def _usable(self, saved: Checkpoint) -> Target | None:
        """None for a checkpoint that cannot be sampled from here."""
        number = self._number(saved.base_model)
        if number is None or saved.weights is None:
            return None
        base = self._bases[number]
        if (base.current_weights is not None) != isinstance(saved.weights, FullWeights):
            return None
        return base.target(str(saved.path), saved, number)

    def _number(self, name: str) -> int | None:
        """Which base model has this name."""
        return next((number for number, base in enumerate(self._bases) if name in base.names), None)


def _refused(message: str) -> OpenAIError:
    return OpenAIError(message, param="model")
