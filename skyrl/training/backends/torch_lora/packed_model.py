"""The base model as one module over packed rows: one call computes the target logprobs of a whole micro-batch.

Knows transformers' models, the wrapped linear layers, and the experts. Knows nothing of loading, losses or gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.training.backends.torch_lora import attention, recurrence
from skyrl.training.backends.torch_lora.adapter import Target
from skyrl.training.backends.torch_lora.attention_checks import AttentionCall, noted_calls
from skyrl.training.backends.torch_lora.experts import mixture_of
from skyrl.training.backends.torch_lora.gated_mlp import keep_less
from skyrl.training.backends.torch_lora.logprobs import Targets, exceed_a_chunk, target_logprobs
from skyrl.training.backends.torch_lora.lora import ActiveSegments, LoraSegment, MultiLoraLinear
from skyrl.training.backends.torch_lora.lora_experts import OWN_PRODUCTS, MultiLoraExperts
from skyrl.training.backends.torch_lora.output_layer import LogitTransform, OutputLayer, given_logits
from skyrl.training.backends.torch_lora.packing import PackedSlice
from skyrl.training.backends.torch_lora.projections import wrap_experts, wrap_linears
from skyrl.training.backends.torch_lora.recomputation import Recomputation, Setting
from skyrl.training.backends.torch_lora.routing import Routing, routers_of
from skyrl.training.backends.torch_lora.segments import copied_rows


class PackedModel(nn.Module):
    """A causal language model whose linear layers serve many adapters.

    All uses of parameters are inside its `forward`, those of the output layer too. So FSDP2, which gathers parameters
    in a module's forward hooks, gathers the parameters that belong to no decoder layer once for each call.

    Raises ValueError for a model with layers that adapters cannot train (`wrap_linears`).
    """

    recomputation: Recomputation | None = None
    reach: int
    """How many rows before it a recurrent layer's convolution reads; 0 for a model without such layers."""

    def __init__(self, model: Any, *, mlp_of_mixtures: bool = False) -> None:
        """Adapters can also train a mixture's experts, and the MLPs of its other layers. If they cannot, that is an
        error with `mlp_of_mixtures` alone."""
        super().__init__()
        self.active = ActiveSegments()
        routers = routers_of(model)
        self.routing = Routing(routers)
        self.mixture = mixture_of(routers)
        self.experts: dict[str, MultiLoraExperts] = {}
        try:
            self.experts = wrap_experts(model, self.active)
        except ValueError:
            if mlp_of_mixtures:
                raise
        mlp = self.mixture is None or bool(self.experts)
        self.linears: dict[str, MultiLoraLinear] = wrap_linears(model, self.active, mlp=mlp)
        self.model = model
        self.reach = recurrence.install(self.decoder_layers)

    @property
    def targets(self) -> list[Target]:
        """The layers that adapters can train: linear layers in module order, then experts."""
        linears = [linear.target for linear in self.linears.values()]
        return linears + [target for experts in self.experts.values() for target in experts.targets]

    @property
    def lm_head(self) -> OutputLayer:
        linear = next(linear for name, linear in self.linears.items() if name.rsplit(".", 1)[-1] == "lm_head")
        return OutputLayer(linear.for_segment, linear.base, self.transform)

    @property
    def transform(self) -> LogitTransform:
        return LogitTransform.of(self.model.config.get_text_config())

    @property
    def decoder_layers(self) -> nn.ModuleList:
        return self.model.get_decoder().layers

    def use_own_kernels(self) -> None:
        """From now on attention takes packed rows, and experts compute with `expert_product`. On a CPU gated MLPs keep
        less; on a GPU the products that they compute again would cost the host more than they are worth."""
        self.model.set_attn_implementation(attention.NAME)
        if next(self.model.parameters()).device.type == "cpu":
            keep_less(self.model)
        if self.mixture is not None:
            self.model.set_experts_implementation(OWN_PRODUCTS)

    def recompute(self, setting: Setting, *, ranks: int = 1, anywhere: Callable[[bool], bool] = bool) -> None:
        """Gradient checkpointing of later micro-batches: see `Recomputation`. Without this call there is none."""
        layers = list(self.decoder_layers)
        self.recomputation = Recomputation(layers, setting, ranks=ranks, anywhere=anywhere)

    def _recomputation(self, slices: Sequence[PackedSlice]) -> AbstractContextManager[None]:
        if self.recomputation is None:
            return nullcontext()
        rows = sum(len(packed.tokens) for packed in slices)
        copies = sum(copied_rows(packed.layout.segments) for packed in slices)
        leaves = [leaf for segment in self.active.segments for pair in segment.pairs.values() for leaf in pair]
        return self.recomputation.of_micro_batch(rows, copies, leaves)

    def forward(
        self, slices: Sequence[PackedSlice], targets: Sequence[Targets], segments: Sequence[LoraSegment]
    ) -> list[Tensor]:
        """The target logprobs of each segment, float32 [entries]. Segments consist of one or more slices, and there are
        targets for each. The caller makes them the active ones until the backward has ended."""
        with self._recomputation(slices):
            hidden = self._hidden_states(slices)
        head = self.lm_head
        recompute = exceed_a_chunk(targets, head)
        return [  # clones, because FSDP2 warns of outputs that are views
            target_logprobs(hidden[segment.start : segment.stop], of_rows, head, segment, recompute=recompute).clone()
            for of_rows, segment in zip(targets, segments, strict=True)
        ]

    def packed_logits(self, packed: PackedSlice) -> Tensor:
        """The base model's logits of packed rows, float32 [rows, vocabulary]."""
        hidden = self._hidden_states([packed])
        return self.lm_head.for_segment(hidden, LoraSegment(packed.start, packed.stop, 1.0)).float()

    def stock_logits(self, sequences: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The base model's logits as transformers computes them, each sequence alone: float32 [tokens, vocabulary].

        sequences: the arguments of transformers' model for each, such as `input_ids`, int64 [1, tokens]. The attention
        must be transformers' own. The experts that the tokens use are recorded in `routing`."""
        with self.routing.recording():
            return torch.cat([self.model(**inputs, use_cache=False).logits[0].float() for inputs in sequences])

    def changed_logits(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Evenly spaced numbers, and what the model makes of them as the output layer's result. row: int64 [1, tokens];
        both float32 [tokens, vocabulary]. The attention must be transformers' own."""
        with given_logits(self.model.get_output_embeddings()) as given:
            made = self.model(input_ids=row, use_cache=False).logits
        return given[0][0].float(), made[0].float()

    def attention_calls(self, row: Tensor) -> list[AttentionCall]:
        """What each layer asks its attention for. row: int64 [1, tokens]."""
        with noted_calls(self.model) as calls:
            self.model(input_ids=row, use_cache=False)
        return calls

    @contextmanager
    def embeddings_in_graph(self) -> Iterator[list[Tensor]]:
        """Inside, the embeddings [1, rows, hidden] require a gradient, and the list gets them at every call. A backward
        to them goes through every decoder layer, whichever layers the adapters train."""
        found: list[Tensor] = []

        def require_gradient(module: nn.Module, args: object, output: Tensor) -> None:
            found.append(output.requires_grad_())

        handle = self.model.get_input_embeddings().register_forward_hook(require_gradient)
        try:
            yield found
        finally:
            handle.remove()

    def _hidden_states(self, slices: Sequence[PackedSlice]) -> Tensor:
        """Final hidden states [rows, hidden] of packed slices, with the active segments."""
        self.routing.follow(slices)
        layout: dict[str, Any] = {}
        if self.reach:
            recomputed = self.recomputation is not None and self.recomputation.recomputes
            layout[recurrence.ROWS] = recurrence.PackedRows.of(slices, self.reach, recomputed=recomputed)
        output = self.model.get_decoder()(
            **self._inputs(slices),
            use_cache=False,
            attention_groups=slices[0].part or attention.PackedGroups([packed.groups for packed in slices]),
            **layout,
        )
        return output.last_hidden_state[0]

    def _inputs(self, slices: Sequence[PackedSlice]) -> dict[str, Any]:
        """What the decoder computes from: ids and positions; where rows hold pictures, embeddings, the positions of
        tokens with those in time, height and width, and what the first layers add."""
        tokens = torch.cat([packed.tokens for packed in slices])[None]
        positions = torch.cat([packed.positions for packed in slices])[None]
        seeing = [(packed, packed.pictures) for packed in slices if packed.pictures is not None]
        if not seeing:
            return {"input_ids": tokens, "position_ids": positions}
        embeddings = self.model.get_input_embeddings()(tokens)
        rows = torch.cat([packed.start + pictures.rows for packed, pictures in seeing])
        of_pictures = torch.cat([pictures.embeddings for _, pictures in seeing]).to(embeddings.dtype)
        of_axes = [
            packed.positions.expand(3, -1) if packed.pictures is None else packed.pictures.positions
            for packed in slices
        ]
        inputs: dict[str, Any] = {
            "inputs_embeds": embeddings.index_copy(1, rows, of_pictures[None]),
            "position_ids": torch.cat([positions, torch.cat(of_axes, dim=1)])[:, None],
        }
        deepstack = list(zip(*(pictures.deepstack for _, pictures in seeing), strict=True))
        if deepstack:
            inputs["visual_pos_masks"] = torch.zeros_like(tokens, dtype=torch.bool).index_fill(1, rows, True)
            inputs["deepstack_visual_embeds"] = [torch.cat(of_layer) for of_layer in deepstack]
        return inputs
