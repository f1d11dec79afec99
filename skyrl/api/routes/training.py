"""Commands of a model: forward, forward_backward, optim_step. Each becomes a future; the engine keeps their order.
Custom losses, which passes name.

A command whose content is wrong is accepted all the same, and fails when its turn comes: clients never send a refused
number again, so a refusal would leave a hole in the model's order.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.responses import Response

from skyrl.api.bodies import body_format
from skyrl.api.call import Body, Call, Struct, reply
from skyrl.api.routing import Routes
from skyrl.api.services import Services
from skyrl.base.types.loss_graph import encode_loss, read_loss
from skyrl.base.types.requests import PASSES, Kind, NewRequest, new_request_id
from skyrl.base.wire.decoding import raw_fields
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.paths import custom_loss_id_of
from skyrl.base.wire.requests import CreateCustomLossRequest, OptimStepRequest, SequencedRequest
from skyrl.base.wire.results import encode_json
from skyrl.base.wire.training import JsonForwardBackward, count_tokens, decode_header
from skyrl.storage.db import custom_losses
from skyrl.storage.db.custom_losses import StoredLoss
from skyrl.storage.db.database import Change
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.models import Model
from skyrl.storage.futures.store import LARGE_BODY_BYTES

PASS = Body(JsonForwardBackward, read_as=bytes, protobuf=True, bound="training")


def command_of(schema: Struct) -> Body:
    """The body of a command: the route reads the model's id and the number, the engine reads the rest."""
    return Body(schema, read_as=SequencedRequest)


def training_routes(services: Services) -> Routes:
    routes = Routes("training")

    @routes.post("/forward_backward", scope="train", body=PASS)
    async def forward_backward(call: Call, body: bytes) -> Response:
        return await _training_pass(services, call, Kind.FORWARD_BACKWARD, body)

    @routes.post("/forward", scope="train", body=PASS)
    async def forward(call: Call, body: bytes) -> Response:
        return await _training_pass(services, call, Kind.FORWARD, body)

    @routes.post("/create_custom_loss", scope="train", body=CreateCustomLossRequest)
    async def create_custom_loss(call: Call, body: CreateCustomLossRequest) -> Response:
        """The loss is checked and stored before the answer, so its future has ended then."""
        tenant, seq_id = call.tenant, body.custom_loss_seq_id
        services.served.check_trains()
        session = await services.session_life.active(body.session_id, tenant)
        if not 0 <= seq_id < 2**31:
            raise RequestError("must be in [0, 2**31)", field="custom_loss_seq_id")
        stored = encode_loss(body)
        read_loss(body)
        loss = StoredLoss(custom_loss_id_of(session.id, seq_id), session.id, tenant, seq_id, stored)
        request = NewRequest(kind=Kind.CREATE_CUSTOM_LOSS, tenant=tenant, session_id=session.id, body=b"")
        outcome = Outcome(encode_json({"type": "create_custom_loss", "loss_id": loss.id}))
        call.recorded = await services.futures.record_ended(request, outcome, lambda c: custom_losses.add(c, loss))
        return reply({"request_id": call.recorded})

    @routes.post("/optim_step", scope="train", body=command_of(OptimStepRequest))
    async def optim_step(call: Call, header: SequencedRequest) -> Response:
        return await submit_sequenced(services, call, Kind.OPTIM_STEP, header, call.body)

    return routes


async def _training_pass(services: Services, call: Call, kind: Kind, body: bytes) -> Response:
    encoding = body_format(call.request)
    return await submit_sequenced(services, call, kind, decode_header(body, encoding), body, encoding)


async def submit_sequenced(
    services: Services, call: Call, kind: Kind, header: SequencedRequest, body: bytes, encoding: str = "json"
) -> Response:
    """`submit` for a command that names its model."""
    services.served.check_trains()
    model = await services.models.named(header.model_id, call.tenant)
    return await submit(services, call, kind, model, header.seq_id, body, encoding)


async def submit(
    services: Services,
    call: Call,
    kind: Kind,
    model: Model,
    seq_id: int | None,
    body: bytes,
    encoding: str = "json",
    first: Change | None = None,
) -> Response:
    """Record one command, ring the engine, and answer with the request's id. A command without a number runs after all
    earlier commands of its model. `first` runs in the transaction that records the command (`FutureStore.record`)."""
    if seq_id is not None and not 0 <= seq_id < 2**62:  # the numbers after it fit into a row
        raise RequestError("must be in [0, 2**62)", field="seq_id")
    request_id, of_pictures = new_request_id(), 0
    if kind in PASSES:
        pictures = services.served.of(model.base_model).sampling.pictures
        body, of_pictures = await pictures.training(body, encoding, model.tenant, request_id)
    tokens = await _tokens_to_charge(services, kind, model.tenant, body, encoding, of_pictures)
    with services.quotas.charged(model.tenant, tokens) as charge:
        request_id, charge.kept = await services.futures.record(
            NewRequest(
                kind=kind,
                tenant=model.tenant,
                session_id=model.session_id,
                body=body,
                body_format=encoding,
                model_id=model.id,
                seq_id=seq_id,
                identity=_identity(kind, body),
                id=request_id,
                not_before=charge.not_before,
                numbered=seq_id is None,
            ),
            first=first,
        )
    call.recorded = request_id
    services.engine.ring()
    await services.models.touch(model.id)
    return reply({"request_id": request_id, "model_id": model.id})


async def _tokens_to_charge(
    services: Services, kind: Kind, tenant: str, body: bytes, encoding: str, of_pictures: int
) -> int:
    """How many of the tenant's tokens per minute a pass takes, with those of its pictures; 0 if they are not limited,
    or if the body cannot be read: such a pass fails when its turn comes."""
    if kind not in PASSES or not services.quotas.counts_tokens(tenant):
        return 0
    try:
        if len(body) > LARGE_BODY_BYTES:
            return of_pictures + await asyncio.to_thread(count_tokens, body, encoding)
        return of_pictures + count_tokens(body, encoding)
    except RequestError:
        return 0


def _identity(kind: Kind, body: bytes) -> bytes | None:
    """The part of a body that a repeat of the request has too; None: the whole body. A save for sampling is compared
    without the number of its sampling session: when the SDK repeats an unnamed save it takes a new number, and then it
    uses the session that the answer names."""
    if kind is not Kind.SAVE_WEIGHTS_FOR_SAMPLER:
        return None
    try:
        fields = raw_fields(body)
    except RequestError:
        return None
    fields.pop("sampling_session_seq_id", None)
    return msgspec.json.encode(fields, order="deterministic")
