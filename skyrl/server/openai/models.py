"""The models of a tenant: the base model under its served names, and the checkpoints that the tenant can sample from.

Knows names, checkpoints and their weights. Sends nothing: the inference server's own list has the adapters of all
tenants and the places of their files, and is never shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import BaseWeights, FullWeights, WeightsRef, served_version
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.paths import parse_path
from skyrl.server.openai.errors import OpenAIError, model_not_found
from skyrl.server.sampling.job import ContextLimits
from skyrl.server.sampling.loaded_weights import LoadedWeights
from skyrl.server.sampling.sampler_job import served_name
from skyrl.storage.db.checkpoints import Checkpoint, Checkpoints, Seen

MAX_LISTED = 1000
"""Checkpoints in the list, the newest ones. OpenAI's list has no pages; any other checkpoint is found by its name."""


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that a request asks for. `name` is the caller's name for them, `served_name` the inference server's.
    `created_at` is in seconds since the epoch. An answer must begin with the weights that the inference server calls
    `version`; None if it never changes them."""

    name: str
    served_name: str
    base_model: str
    weights: WeightsRef
    created_at: float = 0.0
    version: str | None = None

    @property
    def description(self) -> dict[str, Any]:
        """The model as `models` shows it."""
        described = {"id": self.name, "object": "model", "created": int(self.created_at), "owned_by": "skyrl"}
        return described if isinstance(self.weights, BaseWeights) else described | {"parent": self.base_model}


class ModelNames:
    """Finds the weights behind a name: a served name, `tinker://...` or `BASE;tinker://...`."""

    def __init__(
        self,
        config: ServerConfig,
        checkpoints: Checkpoints,
        limits: Callable[[], ContextLimits],
        loaded: LoadedWeights | None = None,
    ) -> None:
        """`loaded` is None if the inference server never changes its weights."""
        self._served_names = config.served_names
        self._bases = (*config.served_names, config.base_model_path)
        """All names of the base model, in requests and in checkpoints."""
        self._checkpoints = checkpoints
        self._limits = limits
        self._loaded = loaded

    async def find(self, name: str, tenant: str) -> Target:
        """Raises OpenAIError: 404 for what does not exist for this tenant, and for weights that are not loaded any
        more; 400 for a checkpoint of another base."""
        target = await self._find(name, tenant)
        if self._loaded is not None and (replaced := await self._loaded.replaced(target.weights)) is not None:
            raise OpenAIError(replaced, status=404, param="model", code="model_not_found")
        return target

    async def _find(self, name: str, tenant: str) -> Target:
        if name in self._served_names:
            return Target(name, self._served_names[0], name, BaseWeights(), version=self._version(BaseWeights()))
        base, separator, path = name.rpartition(";")
        try:
            saved = await self._checkpoints.find(parse_path(path, "model"), tenant)
        except RequestError:
            saved = None
        if saved is None or saved.weights is None:
            raise model_not_found(name)
        if saved.base_model not in self._bases:
            raise _refused(f"{path} was trained from {saved.base_model!r}, which is not served here")
        if separator and base not in self._bases:
            raise _refused(f"{base!r} is not the model that {path} was trained from")
        return self._target(name, saved)

    async def listed(self, tenant: str) -> list[dict[str, Any]]:
        """The served names, and the tenant's own newest checkpoints. Published ones are found by their names."""
        length = self._limits().max_context
        served = [Target(name, name, name, BaseWeights()).description for name in self._served_names]
        if length is not None:
            served = [model | {"max_model_len": length} for model in served]
        own, _ = await self._checkpoints.page(tenant, MAX_LISTED, 0, Seen(kinds=("sampler_weights",)))
        usable = [saved for saved in own if saved.weights is not None and saved.base_model in self._bases]
        if self._loaded is not None:
            usable = [saved for saved in usable if isinstance(saved.weights, FullWeights)]
        return served + [self._target(str(saved.path), saved).description for saved in usable]

    def _target(self, name: str, saved: Checkpoint) -> Target:
        assert saved.weights is not None
        try:
            full = self._loaded is not None
            served = served_name(saved.weights, self._served_names[0], "model", full_finetuning=full)
        except RequestError as error:
            raise _refused(str(error)) from error
        version = self._version(saved.weights)
        return Target(name, served, saved.base_model, saved.weights, saved.created_at, version)

    def _version(self, weights: WeightsRef) -> str | None:
        return None if self._loaded is None else served_version(weights)


def _refused(message: str) -> OpenAIError:
    return OpenAIError(message, param="model")
