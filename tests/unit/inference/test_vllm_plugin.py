"""Parts of the plugin on vLLM's own classes, without a model: routed experts, and adapters on lm_head."""

from __future__ import annotations

import warnings
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
    from vllm.distributed.aux_output_connector.store import BackgroundBlockObjectStore, BlockObjectStore
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.exceptions import VLLMValidationError
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from skyrl.inference.vllm_plugin import patches
    from skyrl.inference.vllm_plugin.cpu_patches import _add_rows, _AsVersion2
    from skyrl.inference.vllm_plugin.patches import add_lm_head
    from skyrl.inference.vllm_plugin.prefix_cache import name_rows_anew
    from skyrl.inference.vllm_plugin.server_patches import refuse_ids_beyond_rows

BLOCK, SHAPE = 4, (3, 2)


class Engine:
    """Scheduler and worker of vLLM with a model whose routers choose `expert` for every token."""

    def __init__(self) -> None:
        self.expert = 0
        self.scheduler = AuxOutputSchedulerConnector()
        self.worker: Any = object.__new__(AuxOutputWorkerConnector)
        store = BlockObjectStore(max_bytes=2**12, object_nbytes=BLOCK * SHAPE[0] * SHAPE[1])
        self.worker._capturer = SimpleNamespace(snapshot_routing_data=self._rows)
        self.worker._store = BackgroundBlockObjectStore(store, max_pending_batches=8)
        self.worker._buffer = RoutedExpertsBuffer(np.dtype(np.uint8), SHAPE, BLOCK, 4, 32, 1)
        self.worker._requests, self.worker._pending_outputs = {}, []
        self.worker._generation, self.worker._max_concurrent_batches = 0, 1
        self.worker._step_metadata, self.worker._lock = None, Lock()
        self.requests: dict[str, Any] = {}

    def _rows(self, count: int) -> torch.Tensor:
        return torch.full((count, *SHAPE), self.expert, dtype=torch.uint8)

    def add(self, name: str, hashes: list[bytes], tokens: int) -> None:
        """A request with a prompt of this many tokens, whose whole blocks have these hashes."""
        params = SimpleNamespace(routed_experts_prompt_start=0)
        self.requests[name] = SimpleNamespace(
            request_id=name,
            block_hashes=list(hashes),
            sampling_params=params,
            num_prompt_tokens=tokens,
            num_output_tokens=0,
            num_tokens=tokens,
            is_finished=lambda: False,
        )

    def step(self, **parts: tuple[int, int, bool]) -> dict[str, np.ndarray | None]:
        """Compute for each request the tokens [first, last); the flag says whether it samples a token. Returns the
        rows that each sampling request gets."""
        counts = {name: last - first for name, (first, last, _) in parts.items()}
        scheduled: Any = SimpleNamespace(num_scheduled_tokens=counts)
        self.worker.begin_step(self.scheduler.build_connector_meta(scheduled, self.requests))
        starts = np.array([first for first, _, _ in parts.values()])
        runner = SimpleNamespace(
            input_batch=SimpleNamespace(num_reqs=len(parts), num_computed_tokens_cpu=np.append(starts, 99)),
            query_start_loc=SimpleNamespace(np=np.cumsum([0, *counts.values(), 0])),
        )
        output: Any = SimpleNamespace(
            req_ids=list(parts), sampled_token_ids=[[7] if samples else [] for _, _, samples in parts.values()]
        )
        _add_rows(self.worker, runner, output)
        rows: dict[str, np.ndarray | None] = {}
        for name, (_, _, samples) in parts.items():
            if samples:
                request = self.requests[name]
                request.num_tokens += 1
                request.num_output_tokens += 1
                rows[name] = self.scheduler.take_output(request, output.aux_output_connector_output)
        return rows

    def end(self, name: str) -> None:
        self.scheduler.request_finished(self.requests.pop(name))

    def experts(self, rows: np.ndarray | None) -> list[int]:
        """The expert of each row."""
        assert rows is not None
        assert rows.shape[1:] == SHAPE
        assert (rows == rows[:, :1, :1]).all()
        return rows[:, 0, 0].tolist()


@pytest.fixture
def engine() -> Any:
    engine = Engine()
    yield engine
    engine.worker.close()


def test_each_request_gets_the_rows_of_its_own_tokens(engine: Engine) -> None:
    engine.add("a", [b"a0"], 6)
    engine.add("b", [], 3)
    engine.expert = 1
    assert engine.step(a=(0, 5, False)) == {}  # a part of the prompt
    engine.expert = 2
    rows = engine.step(b=(0, 3, True), a=(5, 6, True))
    assert engine.experts(rows["b"]) == [2, 2, 2]
    assert engine.experts(rows["a"]) == [1, 1, 1, 1, 1, 2]
    engine.expert = 3
    assert engine.experts(engine.step(a=(6, 7, True))["a"]) == [3]


def test_blocks_of_the_prefix_cache_have_the_rows_of_who_computed_them(engine: Engine) -> None:
    engine.add("a", [b"shared"], 5)
    engine.expert = 1
    engine.step(a=(0, 5, True))
    engine.end("a")
    engine.add("b", [b"shared"], 6)
    engine.expert = 2
    assert engine.experts(engine.step(b=(4, 6, True))["b"]) == [1, 1, 1, 1, 2, 2]


def test_a_block_computed_with_new_weights_has_their_rows(engine: Engine) -> None:
    """Without new names vLLM would keep what it stored under the block's hash."""
    engine.add("a", [b"shared"], 5)
    engine.add("frozen", [], 6)
    engine.expert = 1
    engine.step(a=(0, 5, True), frozen=(0, 6, True))
    engine.end("a")
    name_rows_anew(engine.scheduler)
    engine.expert = 2
    engine.add("b", [b"shared"], 5)
    engine.step(b=(0, 5, True), frozen=(6, 7, True))
    engine.end("b")
    engine.add("c", [b"shared"], 5)
    engine.expert = 3
    rows = engine.step(c=(4, 5, True), frozen=(7, 8, True))
    assert engine.experts(rows["c"]) == [2, 2, 2, 2, 3]
    assert engine.experts(rows["frozen"]) == [3]


def test_vllms_checks_see_the_configuration_with_another_runner() -> None:
    config = _AsVersion2(
        SimpleNamespace(
            use_v2_model_runner=False, other=1, scheduler_config=SimpleNamespace(enable_chunked_prefill=True)
        )
    )
    assert (config.use_v2_model_runner, config.other) == (True, 1)


def _part(kind: type[torch.nn.Module]) -> Any:
    """An empty layer of this class. vLLM's layers cannot be made without its process groups."""
    part = kind.__new__(kind)
    torch.nn.Module.__init__(part)
    return part


def _model(**parts: Any) -> Any:
    """What the plugin reads of a model."""
    given = {"logits_processor": _part(LogitsProcessor), "embedding_modules": {"e": "i"}}
    return SimpleNamespace(**given | parts)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (_model(lm_head=_part(VocabParallelEmbedding)), {"e", "lm_head"}),
        (_model(lm_head=None), {"e"}),
        (_model(lm_head=_part(VocabParallelEmbedding), logits_processor=None), {"e"}),
        (_model(model=SimpleNamespace(embed_tokens=None)), {"e"}),
    ],
)
def test_adapters_may_change_lm_head_where_vllm_can_wrap_it(model: Any, names: set[str]) -> None:
    add_lm_head(model)
    assert set(model.embedding_modules) == names


def test_a_model_that_computes_logits_with_its_embeddings_gets_an_lm_head(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, head = _part(VocabParallelEmbedding), _part(VocabParallelEmbedding)
    monkeypatch.setattr(patches, "_tied_to", {embeddings: head}.__getitem__)
    model = _model(model=SimpleNamespace(embed_tokens=embeddings))
    add_lm_head(model)
    assert model.lm_head is head
    assert set(model.embedding_modules) == {"e", "lm_head"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's layer for adapters on lm_head as the plugin changes it, and the vocabularies that vLLM's own code saw."""
    original, seen = LogitsProcessorWithLoRA.create_lora_weights, list[int]()

    def spy(layer: Any, *args: Any) -> None:
        seen.append(layer.vocab_size)
        original(layer, *args)

    monkeypatch.setattr(LogitsProcessorWithLoRA, "create_lora_weights", spy)
    monkeypatch.setattr(LoRAModelRunnerMixin, "load_lora_model", LoRAModelRunnerMixin.load_lora_model)
    patches.serve_lm_head()
    layer = _part(LogitsProcessorWithLoRA)
    layer.base_layer = _part(LogitsProcessor)
    layer.hidden_size, layer.device, layer.sharded_to_full_mapping = 4, torch.device("cpu"), None
    return layer, seen


@pytest.mark.parametrize(("vocabulary", "allocated"), [(1000, 1000), (patches.VLLMS_BOUND + 64, 0)])
def test_adapters_on_lm_head_have_the_whole_vocabulary_allocated_once(
    served: Any, vocabulary: int, allocated: int
) -> None:
    layer, seen = served
    layer.base_layer.vocab_size = vocabulary
    layer.create_lora_weights(2, SimpleNamespace(max_lora_rank=1, lora_dtype=torch.float16))
    assert seen == [allocated]
    assert layer.base_layer.vocab_size == vocabulary
    assert layer.lora_a_stacked.shape == (2, 1, 1, 4)
    assert (layer.lora_b_stacked.shape, layer.lora_b_stacked.dtype) == ((2, 1, vocabulary, 1), torch.float16)
    assert not layer.lora_b_stacked.any()


def test_more_elements_than_the_kernels_for_cuda_can_address_are_refused(served: Any) -> None:
    layer, seen = served
    layer.base_layer.vocab_size, layer.device = 2**18, torch.device("cuda")
    config = SimpleNamespace(max_lora_rank=512, lora_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"lower trainer\.policy\.model\.lora\.max_loras or .*max_lora_rank"):
        layer.create_lora_weights(17, config)
    assert seen == []


def test_a_tied_lm_head_has_the_rows_of_the_embeddings_on_each_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_world_size", lambda: 2)
    embeddings = VocabParallelEmbedding(100, 4, params_dtype=torch.float32, padding_size=16)
    head = patches._tied_to(embeddings)
    assert head.weight is embeddings.weight
    assert head.get_sharded_to_full_mapping() == embeddings.get_sharded_to_full_mapping()


@pytest.mark.parametrize("sees", [False, True])
def test_ids_beyond_the_models_rows_are_refused_unless_they_may_be_pictures(
    sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseRenderer, "validate_token_ids", BaseRenderer.validate_token_ids)
    config = SimpleNamespace(is_multimodal_model=sees, get_vocab_size=lambda: 512)
    renderer: Any = SimpleNamespace(tokenizer=SimpleNamespace(max_token_id=512), model_config=config)
    refuse_ids_beyond_rows()
    BaseRenderer.validate_token_ids(renderer, [])
    BaseRenderer.validate_token_ids(renderer, [3, 511])
    if sees:
        BaseRenderer.validate_token_ids(renderer, [3, 512])
        return
    with pytest.raises(VLLMValidationError, match="Token id 512 is out of vocabulary: the model has 512 rows"):
        BaseRenderer.validate_token_ids(renderer, [3, 512])
    with pytest.raises(VLLMValidationError, match="Token id -1"):
        BaseRenderer.validate_token_ids(renderer, [-1, 512])
