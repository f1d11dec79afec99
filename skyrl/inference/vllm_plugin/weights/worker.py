"""The extension of vLLM's worker: `--worker-extension-cls skyrl.inference.vllm_plugin.weights.worker.WeightUpdates`.

vLLM makes this class a base of its worker class, and imports this module before it loads the model. Calls come from
`/collective_rpc`; without vLLM's development endpoints there are none.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as layers
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from skyrl.inference.vllm_plugin.weights.forms import keep_projections
from skyrl.inference.vllm_plugin.weights.line import Line
from skyrl.inference.vllm_plugin.weights.model import ServedModel
from skyrl.inference.vllm_plugin.weights.receiver import Receiver

logger = logging.getLogger("vllm.skyrl_plugin")

if current_platform.is_cpu():
    # oneDNN packs linear layers and drops their tensors: then an update changes only the other layers, silently.
    custom_ops._supports_onednn = False
    # Another kernel keeps a packed copy beside the tensor, of the head too: an update would not reach the copy.
    layers.check_cpu_sgl_kernel = lambda n, k, dtype: False
    keep_projections()


class WeightUpdates:
    """vLLM refuses an extension that has a name of its worker's, so every name here has a prefix."""

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def skyrl_weights(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer one call of `Receiver`. `line`: where calls that need no engine are answered, too; null if that cannot
        be opened."""
        receiver = self.__dict__.get("_skyrl_receiver")
        if receiver is None:
            receiver = self.__dict__["_skyrl_receiver"] = self._skyrl_new_receiver()
            try:
                self.__dict__["_skyrl_line"] = Line(receiver.answer)
            except OSError as error:
                logger.warning("all calls about weights wait for the engine: %s", error)
        line = self.__dict__.get("_skyrl_line")
        return receiver.answer(call, arguments) | {"line": None if line is None else line.address}

    def _skyrl_new_receiver(self) -> Receiver:
        from skyrl.weights.process_group import join

        parallel = self.vllm_config.parallel_config
        ranks = {
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
            "tp_size": parallel.tensor_parallel_size,
            "pp_rank": parallel_state.get_pp_group().rank_in_group,
            "pp_size": parallel.pipeline_parallel_size,
        }
        model = ServedModel(
            self.model_runner.model,
            self.vllm_config.model_config.model,
            self.vllm_config.model_config.hf_config,
            self.vllm_config.quant_config,
            parallel.tensor_parallel_size,
        )
        rank = ranks["pp_rank"] * ranks["tp_size"] + ranks["tp_rank"]

        def prepare() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)

        return Receiver(model, join, self.device, ranks, rank, prepare)
