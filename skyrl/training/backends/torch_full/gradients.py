"""Where a backward leaves the gradients of a module's parameters: in float32 buffers, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


class GradientSink:
    """Adds the gradients of parameters to buffers, as soon as each gradient is there, and keeps no other gradient. So
    the gradient of a micro-batch never exists as a whole."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], local: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        """`local`: the part of a gradient that is added, which is this rank's shard where there are ranks."""
        self._views: Mapping[str, Tensor] = {}
        self._local = local
        self._parameters = dict(parameters)
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(self._adding(name))

    @contextmanager
    def into(self, views: Mapping[str, Tensor]) -> Iterator[None]:
        """A backward inside adds to these float32 tensors, by the parameters' names."""
        self._views = views
        try:
            yield
        finally:
            self._views = {}
            for parameter in self._parameters.values():
                parameter.grad = None

    def _adding(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._views[name].add_(self._local(parameter.grad))
                parameter.grad = None

        return add
