"""The base model as one module over packed rows: one call computes the target logprobs of a whole micro-batch.

Finds the linear layers and experts that adapters can train, and wraps them. Knows transformers' models. Knows nothing
of loading, losses or gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.attention import packed_attention, recurrent, relative_layers
from skyrl.trainer.attention.indexers import Indexing
from skyrl.trainer.attention.packed_attention import AttentionCall, recorded_calls
from skyrl.trainer.experts.layers import OWN_PRODUCTS, MultiLoraExperts
from skyrl.trainer.experts.routing import Routing, mixture_of, routers_of
from skyrl.trainer.graphs.pieces import Graphs
from skyrl.trainer.kernels.between import Between
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.lora.linear import ActiveSegments, LoraSegment, MultiLoraLinear, keep_less
from skyrl.trainer.model import layer_pieces
from skyrl.trainer.model.layer_graphs import LayerGraphs
from skyrl.trainer.model.logprobs import (
    LogitTransform,
    OutputLayer,
    Targets,
    exceed_a_chunk,
    given_logits,
    target_logprobs,
    values_of,
)
from skyrl.trainer.model.recomputation import Recomputation, Setting
from skyrl.trainer.rows.packing import PackedItem
from skyrl.trainer.rows.prefixes import copied_rows


@dataclass(frozen=True)
class Form:
    """The linear layers of the decoder layers of some families. A decoder layer has those of one of the `mixers`, which
    let tokens read earlier ones, and of `mlp`, each once. With `apart`, it has those of a mixer or of `mlp`. `frozen`:
    others that it may have, which no adapter changes."""

    mixers: tuple[tuple[str, ...], ...]
    mlp: tuple[str, ...]
    apart: bool = False
    frozen: tuple[str, ...] = ()

    def fits(self, leaves: Sequence[str], *, with_experts: bool) -> bool:
        """Whether a decoder layer may have these linear layers. The MLP of one with experts may be missing."""
        if self.apart:
            allowed = [*self.mixers, self.mlp, *[()] * with_experts]
        else:
            allowed = [mixer + self.mlp for mixer in self.mixers] + [*self.mixers] * with_experts
        return sorted(leaf for leaf in leaves if leaf not in self.frozen) in map(sorted, allowed)


_GATED = ("gate_proj", "up_proj", "down_proj")
_ROUTERS = ("wg", "proj")
"""Routers that are linear layers, or have one: Hunyuan's and Gemma 4's."""
_PER_LAYER_INPUTS = ("per_layer_input_gate", "per_layer_projection")
"""How Gemma 4's layers take each token's embedding for that layer."""
_INDEXERS = ("wq_b", "wk", "weights_proj")
FORMS = (
    Form(
        (
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),  # the gated delta rule of Qwen3.5
            ("in_proj_qkvz", "in_proj_ba", "out_proj"),  # of Qwen3-Next
            ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),  # latent attention of DeepSeek
            ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
            (*("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj"), *("b_proj", "g_a_proj", "g_b_proj", "o_proj")),
            ("q_proj", "o_proj"),  # Gemma 4, where a layer reads the keys and values of an earlier one
        ),  # the one before: the delta rule of Kimi-Linear
        _GATED,
        frozen=("shared_expert_gate", "kv_b_proj", "r_proj", *_ROUTERS, *_PER_LAYER_INPUTS, *_INDEXERS),
    ),
    Form((("q_proj", "o_proj"),), _GATED, frozen=("k_proj", *_ROUTERS)),  # Gemma 4, where the values are the keys
    Form((("qkv_proj", "o_proj"),), ("gate_up_proj", "down_proj")),  # Phi-3
    Form((("q_proj", "k_proj", "v_proj", "dense"),), ("fc1", "fc2")),  # Phi
    Form(  # LFM2 and, with the second mixer and a gate of each head, LFM3
        (
            ("q_proj", "k_proj", "v_proj", "out_proj"),
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            ("in_proj", "out_proj"),
        ),
        ("w1", "w3", "w2"),
        frozen=("g_proj",),
    ),
    Form(
        (("q_proj", "k_proj", "v_proj", "o_proj"), ("in_proj",)),
        ("up_proj", "down_proj"),
        apart=True,
        frozen=("out_proj", "fc1_latent_proj", "fc2_latent_proj"),
    ),
)
"""A fused projection is one layer with one pair of matrices, as PEFT and vLLM have it. vLLM must load adapters on all
of a form: GLM-4, with the attention of the first and the MLP of the second form, is none, because vLLM wants its MLP in
parts. The last form is that of Nemotron-H, with Mamba-2 as its other mixer. Frozen layers are routers, those whose
adapters vLLM would ignore, those of indexers, of which no gradient is known, and Mamba-2's `out_proj`, which PEFT
refuses. Where the values are the keys, vLLM would add the update of `k_proj` to the keys alone, and transformers
computes it for both."""

UNEMBED = ("lm_head",)
ATTENTION = tuple(dict.fromkeys(leaf for form in FORMS for mixer in form.mixers for leaf in mixer))
MLP = tuple(dict.fromkeys(leaf for form in FORMS for leaf in form.mlp))
_LAYER = re.compile(r"^(.*\blayers\.\d+)\.")


def wrap_linears(model: nn.Module, active: ActiveSegments, *, mlp: bool = True) -> dict[str, MultiLoraLinear]:
    """Replace every linear layer that adapters can train by a MultiLoraLinear. Returns the new layers in module order.
    Without `mlp` the MLPs of all layers stay as they are.

    Raises ValueError unless the linear layers of each decoder layer are those of one of `FORMS` (the MLP of a layer
    that has experts may be missing), and the model has one lm_head: otherwise other projections would silently stay
    untrained.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    forms = _forms(model, list(linears))
    wrapped: dict[str, MultiLoraLinear] = {}
    for name, linear in linears.items():
        parent, _, leaf = name.rpartition(".")
        match = _LAYER.match(name)
        form = forms[match.group(1)] if match is not None else None
        if leaf in UNEMBED if form is None else leaf not in form.frozen and (mlp or leaf not in form.mlp):
            wrapped[name] = MultiLoraLinear(name, linear, active)
            setattr(model.get_submodule(parent), leaf, wrapped[name])
    return wrapped


def _forms(model: nn.Module, names: Sequence[str]) -> dict[str, Form]:
    """The form of each decoder layer with linear layers, by the layer's name. names: of all linear layers."""
    with_experts = {match.group(1) for name, _ in experts_in(model) if (match := _LAYER.match(name))}
    layers: dict[str, list[str]] = {}
    heads: list[str] = []
    for name in names:
        match = _LAYER.match(name)
        if match is not None:
            layers.setdefault(match.group(1), []).append(_leaf(name))
        elif _leaf(name) in UNEMBED:
            heads.append(name)
    if not any(leaf in ATTENTION for leaves in layers.values() for leaf in leaves):
        raise ValueError(f"no linear layers of a known name found; LoRA can train {_known()}, and lm_head")
    if len(heads) != 1:
        raise ValueError(f"needs one lm_head, found {len(heads)}")
    forms: dict[str, Form] = {}
    for prefix, leaves in layers.items():
        fitting = [form for form in FORMS if form.fits(leaves, with_experts=prefix in with_experts)]
        if not fitting:
            raise ValueError(
                f"the projections of {prefix} are none that LoRA can train: each layer needs, each once, {_known()}; "
                f"this layer has {_weights(model.get_submodule(prefix))}"
            )
        forms[prefix] = fitting[0]
    return forms


def experts_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that hold the experts of a mixture's layers, with their names."""
    return [(name, module) for name, module in model.named_modules() if _leaf(name) == "experts"]


def wrap_experts(model: nn.Module, active: ActiveSegments) -> dict[str, MultiLoraExperts]:
    """Replace the experts of every layer by MultiLoraExperts, in module order. Raises ValueError for experts that
    adapters cannot train."""
    wrapped = {name: MultiLoraExperts(name, experts, active) for name, experts in experts_in(model)}
    for name, experts in wrapped.items():
        model.get_submodule(name.rpartition(".")[0]).experts = experts
    return wrapped


def _weights(layer: nn.Module) -> str:
    """The submodules with matrices of their own, for example `mlp.experts (GptOssExperts)`."""
    modules = ((name, each) for name, each in layer.named_modules() if name)
    named = [
        f"{name} ({type(each).__name__})"
        for name, each in modules
        if any(parameter.ndim > 1 for parameter in each.parameters(recurse=False))
    ]
    return ", ".join(named[:12]) + (f" and {len(named) - 12} more" if len(named) > 12 else "")


def _known() -> str:
    return "; or ".join(", ".join(form.mixers[0] + form.mlp) for form in FORMS if not form.apart)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def trained_targets(targets: Iterable[Target], spec: LoraSpec, *, mlp: bool = True) -> list[Target]:
    """The targets that the spec's train flags select, in the order given; without `mlp`, none of MLPs and experts."""
    of_mlp = spec.train_mlp and mlp
    leaves = ATTENTION * spec.train_attn + MLP * of_mlp + UNEMBED * spec.train_unembed
    return [each for each in targets if (of_mlp if each.experts is not None else _leaf(each.name) in leaves)]


class PackedModel(nn.Module):
    """A causal language model whose linear layers serve many adapters.

    All uses of parameters are inside its `forward`, those of the output layer too. So FSDP2, which gathers parameters
    in a module's forward hooks, gathers the parameters that belong to no decoder layer once for each call.

    Raises ValueError for a model with layers that adapters cannot train (`wrap_linears`).
    """

    recomputation: Recomputation | None = None
    reach: int
    """How many rows before it a recurrent layer's convolution reads; 0 for a model without such layers."""
    logits_bytes: int | None = None
    """`OutputLayer.chunk_bytes`."""
    layer_graphs: LayerGraphs | None = None
    logprobs_in_kernels: bool = False
    """Whether Triton kernels read the logits (`kernels.logprobs`)."""

    def __init__(self, model: Any, *, mlp_of_mixtures: bool = False) -> None:
        """Adapters can also train a mixture's experts, and the MLPs of its other layers. If they cannot, that is an
        error with `mlp_of_mixtures` alone."""
        super().__init__()
        self.active = ActiveSegments()
        self._varlen = False
        routers = routers_of(model)
        self.routing = Routing(routers)
        self.mixture = mixture_of(routers)
        self.experts: dict[str, MultiLoraExperts] = {}
        self.linears: dict[str, MultiLoraLinear] = {}
        self._wrap(model, mlp_of_mixtures=mlp_of_mixtures)
        self.model = model
        self.reach = recurrent.install(self.decoder_layers)
        relative_layers.install(self.decoder_layers)
        self.indexing = Indexing(self.decoder_layers)

    def _wrap(self, model: Any, *, mlp_of_mixtures: bool) -> None:
        try:
            self.experts = wrap_experts(model, self.active)
        except ValueError:
            if mlp_of_mixtures:
                raise
        self.linears = wrap_linears(model, self.active, mlp=self.mixture is None or bool(self.experts))

    @property
    def targets(self) -> list[Target]:
        """The layers that adapters can train: linear layers in module order, then experts."""
        linears = [linear.target for linear in self.linears.values()]
        return linears + [target for experts in self.experts.values() for target in experts.targets]

    @property
    def lm_head(self) -> OutputLayer:
        linear = next(linear for name, linear in self.linears.items() if name.rsplit(".", 1)[-1] == "lm_head")
        return self._output_layer(linear.for_segment, linear.base, linear.name)

    def _output_layer(
        self, linear: Callable[[Tensor, LoraSegment], Tensor], base: nn.Linear, name: str = ""
    ) -> OutputLayer:
        return OutputLayer(linear, base, self.transform, name, self.logits_bytes, self.logprobs_in_kernels)

    @property
    def transform(self) -> LogitTransform:
        return LogitTransform.of(self.model.config.get_text_config())

    @property
    def decoder_layers(self) -> nn.ModuleList:
        return self.model.get_decoder().layers

    def use_own_kernels(self, *, varlen: bool = False, between: Between | None = None) -> None:
        """From now on attention takes packed rows, with `varlen` in sequences, and experts compute with
        `expert_product`. With `between`, plain decoder layers compute in pieces with these functions; weights then get
        no gradient. On a CPU other gated MLPs keep less; on a GPU the products that they compute again would cost the
        host more than they are worth."""
        self._varlen = varlen
        self.model.set_attn_implementation(packed_attention.NAME)
        if between is not None:
            layer_pieces.install(self.decoder_layers, between)
            self.active.add_grouped = between.add_grouped
        if next(self.model.parameters()).device.type == "cpu":
            keep_less(self.model)
        if self.mixture is not None:
            self.model.set_experts_implementation(OWN_PRODUCTS)

    def use_graphs(self, graphs: Graphs) -> bool:
        """Let the pieces of all decoder layers run as graphs. Returns whether they do: all layers are plain, and their
        weights are parameters, which lie where they are."""
        plain = layer_pieces.plain_layers(self.decoder_layers)
        weights = [linear.base.weight for layer in plain for linear in layer.linears]
        if len(plain) < len(self.decoder_layers) or not all(isinstance(each, nn.Parameter) for each in weights):
            return False
        self.layer_graphs = LayerGraphs(graphs)
        for index, layer in enumerate(plain):
            layer.graphs, layer.index = self.layer_graphs, index
        return True

    def recompute(self, setting: Setting, *, ranks: int = 1, anywhere: Callable[[bool], bool] = bool) -> None:
        """Gradient checkpointing of later micro-batches: see `Recomputation`. Without this call there is none."""
        layers = list(self.decoder_layers)
        self.recomputation = Recomputation(layers, setting, ranks=ranks, anywhere=anywhere)

    def _recomputation(self, slices: Sequence[PackedItem]) -> AbstractContextManager[None]:
        if self.recomputation is None:
            return nullcontext()
        rows = sum(len(packed.tokens) for packed in slices)
        copies = sum(copied_rows(packed.layout.segments) for packed in slices)
        leaves = [leaf for segment in self.active.segments for pair in segment.pairs.values() for leaf in pair]
        return self.recomputation.of_micro_batch(rows, copies, leaves)

    def forward(
        self, slices: Sequence[PackedItem], targets: Sequence[Targets], segments: Sequence[LoraSegment]
    ) -> list[Tensor]:
        """The target logprobs of each segment, float32 [entries]; then the values of each with a value head, float32
        [positions]. Segments consist of one or more slices, and there are targets for each. The caller makes them the
        active ones until the backward has ended."""
        with self._recomputation(slices):
            hidden = self._hidden_states(slices)
        head = self.lm_head
        recompute = exceed_a_chunk(targets, head)
        own = [hidden[segment.start : segment.stop] for segment in segments]
        logprobs = [  # clones, because FSDP2 warns of outputs that are views
            target_logprobs(rows, of_rows, head, segment, recompute=recompute).clone()
            for rows, of_rows, segment in zip(own, targets, segments, strict=True)
        ]
        return logprobs + [values_of(rows, each) for rows, each in zip(own, segments, strict=True) if each.has_values]

    def reshard(self) -> None:
        """Free the gathered parameters outside the decoder layers, which FSDP2 keeps after the forward of a root module
        for its backward. A model that is not divided has none: FSDP2's own method takes the place of this one."""

    def packed_logits(self, packed: PackedItem) -> Tensor:
        """The base model's logits of packed rows, float32 [rows, vocabulary]. Layers with an indexer attend to what it
        has chosen in `stock_logits`."""
        with self.indexing.following(packed):
            hidden = self._hidden_states([packed])
        return self.lm_head.for_segment(hidden, LoraSegment(packed.start, packed.stop, 1.0)).float()

    def stock_logits(self, sequences: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The base model's logits as transformers computes them, each sequence alone: float32 [tokens, vocabulary].

        sequences: the arguments of transformers' model for each, such as `input_ids`, int64 [1, tokens]. The attention
        must be transformers' own. The experts that the tokens use are recorded in `routing`, and what indexers choose
        in `indexing`."""
        with self.routing.recording(), self.indexing.recording():
            return torch.cat([self.model(**inputs, use_cache=False).logits[0].float() for inputs in sequences])

    def changed_logits(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Evenly spaced numbers, and what the model makes of them as the output layer's result. row: int64 [1, tokens];
        both float32 [tokens, vocabulary]. The attention must be transformers' own."""
        with given_logits(self.model.get_output_embeddings()) as given:
            made = self.model(input_ids=row, use_cache=False).logits
        return given[0][0].float(), made[0].float()

    def attention_calls(self, row: Tensor) -> list[AttentionCall]:
        """What each layer asks its attention for. row: int64 [1, tokens]."""
        with recorded_calls(self.model) as calls:
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

    def _hidden_states(self, slices: Sequence[PackedItem]) -> Tensor:
        """Final hidden states [rows, hidden] of packed slices, with the active segments."""
        if self.layer_graphs is not None:
            runs_once = self.recomputation is None or self.recomputation.runs_once
            rows = sum(len(packed.tokens) for packed in slices)
            self.layer_graphs.expect(rows, self.active.segments if runs_once else ())
        if self.mixture is not None:
            self.routing.follow(slices)
        layout: dict[str, Any] = {}
        if self.reach:
            recomputed = self.recomputation is not None and self.recomputation.recomputes
            layout[recurrent.ROWS] = recurrent.PackedRows.of(slices, self.reach, recomputed=recomputed)
        groups = slices[0].part or packed_attention.PackedGroups(
            [packed.groups for packed in slices], varlen=self._varlen
        )
        if self.indexing.any:
            recomputed = self.recomputation is not None and self.recomputation.recomputes
            layout["attention_mask"] = self.indexing.masks(groups, recomputed=recomputed)
        output = self.model.get_decoder()(
            **self._inputs(slices),
            use_cache=False,
            attention_groups=groups,
            **layout,
        )
        return output.last_hidden_state.squeeze(0)

    def _inputs(self, slices: Sequence[PackedItem]) -> dict[str, Any]:
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
