"""Reads a custom loss from its JSON, and refuses what the server would not compute before it is stored.

Every error names the node. Checks names and references only: the shapes of a graph's values follow from the data of a
pass, so the trainer checks them. Executes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from skyrl.base.types import custom_loss as limits
from skyrl.base.types.custom_loss import CustomLoss, Device, Dtype, LossInput, LossNode, Ref, public_name
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import CustomLossBody, CustomLossNode

_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NODE = re.compile(r"\w{1,128}")
_KEYWORD = re.compile(r"[a-zA-Z_]{1,32}")
MAX_DEPTH = 8
"""Levels of nested lists in an argument."""

INSTEAD = (
    "a function (data, logprobs) given to forward_backward_custom is computed in the client, and may use all of torch"
)


def encode_loss(body: CustomLossBody) -> bytes:
    """What is stored of a request. Raises RequestError."""
    stored = msgspec.json.encode(CustomLossBody(body.name, body.inputs, body.graph), order="deterministic")
    if len(stored) > limits.MAX_GRAPH_BYTES:
        raise RequestError(
            f"must have at most {limits.MAX_GRAPH_BYTES} bytes as JSON, got {len(stored)}", field="graph"
        )
    return stored


def decode_loss(stored: bytes) -> CustomLoss:
    """What `encode_loss` has made. Raises RequestError as `read_loss`."""
    return read_loss(decode_json(CustomLossBody, stored))


def read_loss(body: CustomLossBody) -> CustomLoss:
    """The checked loss. Raises RequestError naming the field and the node."""
    if not 1 <= len(body.name) <= 200:
        raise RequestError("must have 1 to 200 characters", field="name")
    inputs = _inputs(body)
    if body.graph.format != 1:
        raise RequestError(f"{body.graph.format} is not known; there is: 1", field="graph.format")
    nodes = body.graph.nodes
    if not len(inputs) < len(nodes) <= limits.MAX_NODES:
        raise RequestError(
            f"must be the inputs, the operations and the output, at most {limits.MAX_NODES}; got {len(nodes)}",
            field="graph.nodes",
        )
    known: set[str] = set()
    found: list[LossNode] = []
    for number, node in enumerate(nodes):
        field = f"graph.nodes[{number}]"
        if not _NODE.fullmatch(node.name) or node.name in known:
            raise RequestError(f"{node.name[:128]!r} is no name, or that of an earlier node", field=f"{field}.name")
        expected = "placeholder" if number < len(inputs) else "output" if number == len(nodes) - 1 else None
        if (expected is not None or node.op in ("placeholder", "output")) and node.op != expected:
            raise RequestError(
                f"{node.op!r} at node {node.name!r}: the first nodes are the inputs, the last one is the output",
                field=f"{field}.op",
            )
        found.append(_Arguments(node, known, field).node())
        if node.op == "placeholder" and node.target != inputs[number].name:
            raise RequestError(f"must be {inputs[number].name!r}, the input at this place", field=f"{field}.target")
        if node.op == "output":
            _check_output(found[-1], f"{field}.args")
        known.add(node.name)
    return CustomLoss(body.name, inputs, tuple(found))


def _inputs(body: CustomLossBody) -> tuple[LossInput, ...]:
    names = [given.name for given in body.inputs]
    if not 1 <= len(names) <= limits.MAX_INPUTS or names[0] != "logprobs" or len({*names}) < len(names):
        raise RequestError(
            f"must be logprobs, then other keys of loss_fn_inputs, each once; at most {limits.MAX_INPUTS}",
            field="inputs",
        )
    for number, given in enumerate(body.inputs):
        if not _INPUT.fullmatch(given.name):
            raise RequestError(f"{given.name[:64]!r} is no name of an input", field=f"inputs[{number}].name")
        if not (number == 0) <= given.rank <= 2:
            raise RequestError(f"must be {'1' if number == 0 else '0, 1'} or 2", field=f"inputs[{number}].rank")
    return tuple(LossInput(given.name, given.rank) for given in body.inputs)


class _Arguments:
    """The arguments of one node. `known`: the names of earlier nodes."""

    def __init__(self, node: CustomLossNode, known: set[str], field: str) -> None:
        self._node = node
        self._known = known
        self._field = field

    def node(self) -> LossNode:
        node = self._node
        target = public_name(node.target)
        if node.op in ("call_function", "call_method"):
            served = limits.SERVED if node.op == "call_function" else limits.METHODS
            if target not in served:
                kind = "function" if node.op == "call_function" else "method of tensors"
                self._refuse(f"the {kind} {node.target[:100]!r} is not served in a custom loss; {INSTEAD}", "target")
        elif node.op not in ("placeholder", "output"):
            self._refuse(f"{node.op[:100]!r} is not served; there is: call_function, call_method", "op")
        if node.op == "placeholder" and (node.args or node.kwargs):
            self._refuse("an input has no arguments", "args")
        args = tuple(self._value(each, "args", 0) for each in node.args)
        kwargs = {name: self._keyword(name, each) for name, each in node.kwargs.items()}
        if target == "getattr" and node.op == "call_function":
            self._check_attribute(args, kwargs)
        return LossNode(node.op, node.name, target, args, kwargs)

    def _refuse(self, message: str, part: str) -> NoReturn:
        raise RequestError(f"node {self._node.name!r}: {message}", field=f"{self._field}.{part}")

    def _check_attribute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs or len(args) != 2 or not isinstance(args[0], Ref) or args[1] not in limits.ATTRIBUTES:
            self._refuse(f"of a tensor there is: {', '.join(sorted(limits.ATTRIBUTES))}", "args")

    def _keyword(self, name: str, value: Any) -> Any:
        if not _KEYWORD.fullmatch(name):
            self._refuse(f"{name[:32]!r} is no keyword", "kwargs")
        if name in limits.NEVER_SET and value is not None and value is not False:
            self._refuse(f"{name} is not served", "kwargs")
        return self._value(value, f"kwargs.{name}", 0)

    def _value(self, value: Any, part: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._refuse(f"is nested more than {MAX_DEPTH} deep", part)
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return value if abs(value) < 2**63 else self._refuse(f"{value} does not fit 64 bits", part)
        if isinstance(value, str):
            is_attribute = self._node.target in ("getattr", "builtins.getattr") and value in limits.ATTRIBUTES
            return (
                value if value in limits.WORDS or is_attribute else self._refuse(f"{value[:64]!r} is not served", part)
            )
        if isinstance(value, list):
            return [self._value(each, part, depth + 1) for each in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, content),) = value.items()
            if (read := self._kinds().get(kind)) is not None:
                return read(content, part, depth)
        self._refuse("is not an argument as the SDK writes it", part)

    def _kinds(self) -> dict[str, Callable[[Any, str, int], Any]]:
        return {
            "ref": self._ref,
            "tuple": self._tuple,
            "dict": self._dict,
            "slice": self._slice,
            "ellipsis": lambda content, part, depth: ...,
            "float": self._float,
            "dtype": self._dtype,
            "device": self._device,
        }

    def _ref(self, content: Any, part: str, depth: int) -> Ref:
        if not isinstance(content, str) or content not in self._known:
            self._refuse(f"{str(content)[:128]!r} is no earlier node", part)
        return Ref(content)

    def _tuple(self, content: Any, part: str, depth: int) -> tuple[Any, ...]:
        if not isinstance(content, list):
            self._refuse("a tuple is a list", part)
        return tuple(self._value(each, part, depth + 1) for each in content)

    def _dict(self, content: Any, part: str, depth: int) -> dict[str, Any]:
        if not isinstance(content, dict) or self._node.op != "output":
            self._refuse("only the output may have a dict", part)
        return {name: self._value(each, part, depth + 1) for name, each in content.items()}

    def _slice(self, content: Any, part: str, depth: int) -> slice:
        if not isinstance(content, list) or len(content) != 3:
            self._refuse("a slice is [start, stop, step]", part)
        return slice(*(self._value(each, part, depth + 1) for each in content))

    def _float(self, content: Any, part: str, depth: int) -> float:
        if content not in ("inf", "-inf", "nan"):
            self._refuse("a float is inf, -inf or nan", part)
        return float(content)

    def _dtype(self, content: Any, part: str, depth: int) -> Dtype:
        if not isinstance(content, str) or content not in limits.DTYPES:
            self._refuse(f"{str(content)[:32]!r} is not served; there is: {', '.join(sorted(limits.DTYPES))}", part)
        return Dtype(content)

    def _device(self, content: Any, part: str, depth: int) -> Device:
        if content != "cpu":
            self._refuse(f"{str(content)[:32]!r} is not served; there is: cpu", part)
        return Device()


def _check_output(node: LossNode, field: str) -> None:
    """Raise RequestError unless it is (loss, metrics)."""
    returned = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[0], Ref):
        raise RequestError("a custom loss returns (loss, metrics), and the loss is a node", field=field)
    metrics = returned[1]
    if not isinstance(metrics, dict) or len(metrics) > limits.MAX_METRICS:
        raise RequestError(f"metrics must be a dict with at most {limits.MAX_METRICS} entries", field=field)
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name) or not isinstance(value, Ref):
            raise RequestError(
                f"metric {name[:100]!r} must be named custom/<name>:sum or custom/<name>:mean, and be a node",
                field=field,
            )
