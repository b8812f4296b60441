"""The controller's HTTP routes. Every one, known or not, asks for the run's token; bodies are `messages.py` as msgpack.

Nothing is decided here: a route decodes its message, calls the fleet or the loop, and encodes the answer. An error's
answer is JSON, `{"error": one line}`: 401 token, 409 does not fit the state of the run, 410 the run is over, 422 not a
message of this route, 504 a wait passed its deadline, 500 anything else (its traceback is in the controller's log).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from a3po_megatron import wire
from a3po_megatron.controller import messages
from a3po_megatron.controller.loop import PUBLISH_AGAIN, Controller, RunOver
from a3po_megatron.controller.publishing import Refused
from a3po_megatron.rollout.middleware import RequireToken

MSGPACK = "application/msgpack"
ERROR_STATUS = {
    Refused: 409,
    RunOver: 410,
    msgspec.DecodeError: 422,  # of which ValidationError is one
    TimeoutError: 504,
    Exception: 500,
}


def create_app(controller: Controller, token: str) -> FastAPI:
    """Return the app of one run. `token` is the run's secret; raises ValueError if it is empty."""
    if not token:
        raise ValueError("the run's token is empty")
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _add_replica_routes(app, controller)
    _add_actor_routes(app, controller)

    @app.get("/status")
    async def status() -> Response:
        return Response(msgspec.json.encode(status_of(controller)), media_type="application/json")

    for error_type, status_code in ERROR_STATUS.items():
        app.add_exception_handler(error_type, _answer_with(status_code))
    app.add_middleware(RequireToken, token=token)
    return app


def status_of(controller: Controller) -> dict[str, Any]:
    """Return the state of the run for people."""
    return {
        "version": controller.version,
        "steps": controller.num_steps,
        "schedule": controller.config.schedule,
        "buffered_groups": len(controller.buffer),
        "running_groups": len(controller.running),
        "finished_groups": controller.accepted,
        "publishing": controller.publishing.under_way,
        "done": controller.done_reason,
        "evaluations": [evaluation.row() for evaluation in controller.evaluations.results.values()],
        "last_row": controller.last_row,
        "fleet": controller.parts.fleet.status(),
    }


def _add_replica_routes(app: FastAPI, controller: Controller) -> None:
    """Routes of the supervisors."""

    @app.post("/replicas/register")
    async def register(request: Request) -> Response:
        message = wire.decode(await request.body(), messages.RegisterReplica)
        answer = await controller.parts.fleet.register(message.name, message.url, message.world_size)
        controller.replica_registered(answer["state"] == "current")
        return _msgpack(answer)

    @app.post("/replicas/deregister")
    async def deregister(request: Request) -> Response:
        message = wire.decode(await request.body(), messages.DeregisterReplica)
        await controller.parts.fleet.deregister(message.name, message.reason)
        return _msgpack({})


def _add_actor_routes(app: FastAPI, controller: Controller) -> None:
    """Routes of the actor's rank 0."""

    @contextmanager
    def actor_call() -> Iterator[None]:
        controller.actor_calls(+1)
        try:
            yield
        finally:
            controller.actor_calls(-1)

    @app.post("/batch")
    async def batch(request: Request) -> Response:
        message = wire.decode(await request.body(), messages.BatchRequest)
        with actor_call():
            found = await controller.next_batch(message.version)
        if found == PUBLISH_AGAIN:
            return Response(status_code=205)
        if found is None:
            return Response(status_code=204)
        return Response(await asyncio.to_thread(wire.encode, found), media_type=MSGPACK)

    @app.post("/publish/begin")
    async def begin(request: Request) -> Response:
        manifest = wire.decode(await request.body(), messages.WeightManifest)
        with actor_call():
            return _msgpack(await controller.begin_publication(manifest))

    @app.post("/publish/finish")
    async def finish(request: Request) -> Response:
        message = wire.decode(await request.body(), messages.PublicationSent)
        with actor_call():
            return _msgpack(await controller.finish_publication(message))

    @app.post("/step")
    async def step(request: Request) -> Response:
        report = wire.decode(await request.body(), messages.StepReport)
        with actor_call():
            await controller.report_step(report)
        return _msgpack({})

    @app.post("/done")
    async def done(request: Request) -> Response:
        controller.actor_is_done(wire.decode(await request.body(), messages.RunDone).reason)
        return _msgpack({})


def _answer_with(status_code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(_: Request, error: Exception) -> Response:
        return _failure(status_code, str(error) if status_code != 500 else f"{type(error).__name__}: {error}")

    return answer


def _failure(status_code: int, text: str) -> Response:
    body = msgspec.json.encode({"error": " ".join(text.split())})
    return Response(body, status_code=status_code, media_type="application/json")


def _msgpack(value: Any) -> Response:
    return Response(wire.encode(value), media_type=MSGPACK)
