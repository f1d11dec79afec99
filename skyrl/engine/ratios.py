"""A check of the ratios of policy gradients: those of fresh samples are 1.

The first pass of a model with ratios, and the first one after each update of its samplers, most likely has samples of
the very weights that it trains. A mean ratio far from 1 then says that the samples' logprobs belong to another
distribution than the one that the trainer scores, most often because the client has not told the temperature and the
cuts of sampling. A wrong temperature alone need not show there: over samples of q the mean of p / q is 1 for any p with
the same support. So the mean of log(q / p) counts as well. Passes on older samples may be far from 1, too, so this is a
warning: once in the log for each model, and a metric of the pass.

Knows metrics by name. Knows nothing of commands and bodies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from cachetools import LRUCache

from skyrl.trainer.rows.sampled_from import SAMPLING_KEYS

RATIO, DIVERGENCE = "ratio:mean", "kl:mean"
NOTICE = "ratio_far_from_1:max"
"""The metric, 1.0. The pass's request may come in parts, of which the SDK keeps the metrics that all have: so the later
passes until the next update have it, too."""
LEAST, MOST = 0.9, 1.1
MOST_DIVERGENCE = 0.05
"""In nats. Rounding in the sampler gives 1e-4 to 1e-2."""
MODELS = 4096
"""So many models are remembered. A model that is forgotten may be warned of again."""

logger = logging.getLogger(__name__)


@dataclass
class _Checked:
    """`is_open`: the next pass with ratios is checked. `is_far`: passes get the notice. `warned`: once is enough."""

    is_open: bool = True
    is_far: bool = False
    warned: bool = False


class RatioCheck:
    """Of all models of an engine. May be called on any thread; the calls for one model come one after the other."""

    def __init__(self) -> None:
        self._models: LRUCache[str, _Checked] = LRUCache(MODELS)
        self._lock = threading.Lock()

    def updated(self, model_id: str) -> None:
        """The model's samplers have got its weights, or it has loaded others."""
        checked = self._of(model_id)
        checked.is_open, checked.is_far = not checked.warned, False

    def notice(self, model_id: str, metrics: Mapping[str, float], loss_config: Mapping[str, float]) -> dict[str, float]:
        """Metrics to add to those of a pass. `metrics` and `loss_config` are the pass's."""
        if (ratio := metrics.get(RATIO)) is None:
            return {}
        checked = self._of(model_id)
        if checked.is_open:
            is_near = LEAST <= ratio <= MOST and abs(metrics[DIVERGENCE]) <= MOST_DIVERGENCE
            checked.is_open, checked.is_far = False, not is_near
        if not checked.is_far:
            return {}
        if not checked.warned:
            checked.warned = True
            logger.warning("model %s: %s", model_id, _sentence(ratio, metrics[DIVERGENCE], loss_config))
        return {NOTICE: 1.0}

    def _of(self, model_id: str) -> _Checked:
        with self._lock:
            return self._models.setdefault(model_id, _Checked())


def _sentence(ratio: float, divergence: float, loss_config: Mapping[str, float]) -> str:
    found = f"the first pass on fresh samples has a mean ratio of {ratio:.3g} (not 1), a kl of {divergence:.2g} (not 0)"
    told = [f"{key} {loss_config[key]:g}" for key in SAMPLING_KEYS if key in loss_config]
    if told:
        return f"{found}: the samples are of other weights, or were not sampled with {', '.join(told)}"
    return (
        f"{found}: if they were sampled at another temperature than 1, or with top_p or top_k, send "
        f"{', '.join(SAMPLING_KEYS)} in loss_fn_config; else the samples are of other weights"
    )
