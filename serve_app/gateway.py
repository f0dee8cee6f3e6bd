"""The gateway: the ASGI app behind Serve's ingress. Routes, keys, and what every request has in common."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any, Literal

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.admin import Admin
from serve_app.api import errors
from serve_app.api.endpoints import ParsedRequest, parse_chat, parse_completion
from serve_app.api.errors import ApiError
from serve_app.api.responses import ModelCard, model_list
from serve_app.api.schemas import ChatCompletionRequest, CompletionRequest, parse_body
from serve_app.connection import ClientGoneError, Connection
from serve_app.pool import ModelPool
from serve_app.request import RequestLife
from serve_app.telemetry.gateway import GatewayTelemetry
from serve_app.telemetry.metrics import CONTENT_TYPE
from serve_app.telemetry.records import Outcome, RequestRecord, bounded
from serve_app.telemetry.tracing import outgoing_headers
from tenancy.directory import Identity, TenantDirectory
from tenancy.models import Tenant
from tenancy.quota import QuotaStore, QuotaUnavailable

logger = logging.getLogger(__name__)

RENEW_HOLDS_SECONDS = 10.0
CLIENT_CLOSED_REQUEST = 499

Endpoint = Literal["chat", "completions"]
SCOPES = ["/v1/chat/completions", "/v1/completions", "/v1/models"]
"""Routes that a key may be limited to."""


class GatewayApp:
    """Everything one gateway process holds, and the ASGI app over it.

    Deny by default: a route that is not listed here answers 404 or 405 in the API's error shape, and all but health
    and version ask for a key.
    """

    def __init__(
        self,
        *,
        pools: list[ModelPool],
        directory: TenantDirectory,
        quota: QuotaStore | None,
        telemetry: GatewayTelemetry,
        max_request_bytes: int,
        waiting_timeouts: dict[str, float],
        version: str,
    ) -> None:
        self.pools = pools
        self.directory = directory
        self.quota = quota
        self.telemetry = telemetry
        self._by_name = {name: pool for pool in pools for name in pool.names}
        self._max_request_bytes = max_request_bytes
        self.admin = Admin(directory, [pool.model for pool in pools], SCOPES)
        self._waiting_timeouts = waiting_timeouts
        self.metrics_key: str | None = None
        self._version = version
        self._started = int(time.time())
        self._live: set[RequestLife] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._renewal = asyncio.create_task(self._renew_holds())

    def asgi(self) -> FastAPI:
        """The app. API documents are not served without a key, hence not at all yet."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.router.routes[:] = [
            Route("/v1/chat/completions", _Inference(self, "chat"), methods=["POST"]),
            Route("/v1/completions", _Inference(self, "completions"), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._health, methods=["GET"]),
            Route("/live", self._alive, methods=["GET"]),
            Route("/version", self._version_route, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            *self.admin.routes(),
        ]
        app.router.redirect_slashes = False
        app.add_exception_handler(404, lambda request, error: _error_response(errors.not_found()))
        app.add_exception_handler(405, lambda request, error: _error_response(errors.method_not_allowed()))
        app.add_exception_handler(ApiError, _api_error_response)
        app.add_exception_handler(Exception, lambda request, error: _error_response(errors.internal_error()))
        return app

    @property
    def ready(self) -> bool:
        """A request that came now could be served."""
        quota_ready = self.quota is not None and self.quota.healthy
        return quota_ready and self.directory.complete and all(pool.ready for pool in self.pools)

    async def close(self) -> None:
        """Let background endings finish, then stop everything."""
        self._renewal.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=5.0)
        for pool in self.pools:
            pool.stop()
        if self.quota is not None:
            await self.quota.aclose()
        self.telemetry.close()

    # Inference --------------------------------------------------------------------------------------------------

    async def infer(self, endpoint: Endpoint, connection: Connection) -> None:
        """One request from arrival to its record."""
        request_id = connection.headers.get("x-request-id", "")
        request_id = bounded(request_id, 128) if request_id.isascii() and request_id else uuid.uuid4().hex
        route = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
        record = self.telemetry.begin(request_id, route, connection.headers)
        life: list[RequestLife] = []
        work = asyncio.create_task(self._serve(endpoint, connection, record, life))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:  # the server gives the request up
            work.cancel()
            await asyncio.wait({work})
        finally:
            if life:
                self._live.discard(life[0])

    async def _serve(
        self, endpoint: Endpoint, connection: Connection, record: RequestRecord, life: list[RequestLife]
    ) -> None:
        headers = outgoing_headers(record)  # Serve itself echoes x-request-id
        error: ApiError | None = None
        gone = False
        try:
            parsed_life = await self._admit(endpoint, connection, record)
            life.append(parsed_life)
            self._live.add(parsed_life)
            parsed_life.headers.update(headers)
            answer = asyncio.create_task(_reserve_and_respond(parsed_life, connection))
            watch = asyncio.create_task(connection.wait_until_gone())
            try:
                await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
                gone = not answer.done()
            finally:
                watch.cancel()
                while not answer.done():  # whoever cancels us again must not leave it running alone
                    answer.cancel()
                    try:
                        await asyncio.wait({answer}, timeout=0.1)
                    except asyncio.CancelledError:
                        gone = True
            if not gone:
                await answer
        except ApiError as refused:
            error = refused
        except ClientGoneError:
            gone = True
        except asyncio.CancelledError:
            gone = True
        except OSError:  # the connection broke while we wrote to it
            gone = True
        except Exception:
            logger.exception("request %s failed", record.request)
            error = errors.internal_error(f"{record.trace.trace_id:032x}" if record.trace else None)
        if life:
            headers = life[0].headers
        if error is not None:
            await _send_error(connection, error, headers)
        self._finish(record, life[0] if life else None, connection, error, gone)

    async def _admit(self, endpoint: Endpoint, connection: Connection, record: RequestRecord) -> RequestLife:
        """Steps 1 and 2: who asks, and for what. Raises ApiError."""
        identity = self._identify(connection.headers.getlist("authorization"), record.route, record)
        tenant = identity.tenant
        media_type = (
            connection.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        )
        if media_type != "application/json":
            raise errors.unsupported_media_type()
        raw = await connection.read_body(self._max_request_bytes)
        body: ChatCompletionRequest | CompletionRequest
        body = (
            parse_body(raw, ChatCompletionRequest)
            if endpoint == "chat"
            else parse_body(raw, CompletionRequest)
        )
        record.model = body.model
        pool = self._pool(body.model, tenant)
        record.model = pool.model
        parsed: ParsedRequest
        if isinstance(body, ChatCompletionRequest):
            parsed = parse_chat(body, pool.text, pool.max_model_len)
        else:
            parsed = parse_completion(body, pool.text, pool.max_model_len)
        record.validated_ms = record.now_ms()
        if self.quota is None:
            raise ApiError("quota_store_unavailable", "The quota store is not ready. Try again shortly.")
        return RequestLife(
            record,
            identity,
            pool,
            self.quota,
            self.directory.cache_salt(tenant.id),
            parsed,
            self._waiting_timeouts[pool.model],
        )

    def _identify(
        self, authorization: list[str], route: str, record: RequestRecord | None = None
    ) -> Identity:
        """Identity comes from the key alone. Raises ApiError 401, 403 or 503."""
        scheme, _, key = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        identity = self.directory.authenticate(key.strip()) if scheme.lower() == "bearer" else None
        if not self.directory.complete:  # a key may have been revoked, or made
            raise ApiError("quota_store_unavailable", "The server is not ready. Try again shortly.")
        if identity is None:
            raise errors.invalid_api_key()
        if record is not None:
            record.tenant = identity.tenant.id
            record.key_fingerprint = self.directory.fingerprint(key.strip())
            record.authenticated_ms = record.now_ms()
        if not identity.may_call(route):
            raise errors.route_not_allowed()
        return identity

    def _pool(self, model: str, tenant: Tenant) -> ModelPool:
        pool = self._by_name.get(model)
        if pool is None:
            raise errors.model_not_found(model)
        if tenant.models is not None and not set(pool.names) & set(tenant.models):
            raise errors.model_not_allowed(model)
        return pool

    def _finish(
        self,
        record: RequestRecord,
        life: RequestLife | None,
        connection: Connection,
        error: ApiError | None,
        gone: bool,
    ) -> None:
        """Step 9, in the background: the client does not wait for it, and its leaving does not stop it."""

        refused = error is not None and record.submitted_ms is None
        outcome: Outcome
        status, code = connection.status or 500, "internal_error"
        if life is not None and life.complete and error is None:
            outcome, status, code = "ok", 200, ""
        elif gone:
            outcome, status, code = "cancelled", connection.status or CLIENT_CLOSED_REQUEST, ""
        elif error is not None:
            outcome = "refused" if refused and error.status != 500 else "error"
            status, code = connection.status or error.status, error.code
        else:
            outcome = "error"

        async def settle() -> None:
            if life is not None:
                try:
                    await life.finish(outcome, used=not refused)
                except Exception:
                    logger.exception("request %s could not be settled", record.request)
            self.telemetry.end(record, outcome, status, code or None)

        self._spawn(settle())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _renew_holds(self) -> None:
        while True:
            await asyncio.sleep(RENEW_HOLDS_SECONDS)
            holds = [life.hold for life in self._live if life.hold is not None]
            if holds and self.quota is not None:
                try:
                    await self.quota.renew(holds)
                except QuotaUnavailable:
                    logger.warning("the leases of %d requests could not be renewed", len(holds))

    # Other routes -----------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        tenant = self._identify(request.headers.getlist("authorization"), "/v1/models").tenant
        return JSONResponse(model_list(self._cards(tenant)))

    async def _model(self, request: Request) -> Response:
        tenant = self._identify(request.headers.getlist("authorization"), "/v1/models").tenant
        name = request.path_params["model"]
        self._pool(name, tenant)
        return JSONResponse(next(card.to_dict() for card in self._cards(tenant) if card.id == name))

    def _cards(self, tenant: Tenant) -> list[ModelCard]:
        return [
            ModelCard(name, self._started, pool.max_model_len)
            for pool in self.pools
            if tenant.models is None or set(pool.names) & set(tenant.models)
            for name in pool.names
        ]

    async def _health(self, request: Request) -> Response:
        ready = self.ready
        return JSONResponse({"status": "ok" if ready else "unavailable"}, 200 if ready else 503)

    async def _alive(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _version_route(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _metrics(self, request: Request) -> Response:
        """Metrics of this gateway and the engines it hears from, for the holder of the metrics key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if self.metrics_key is None or scheme.lower() != "bearer" or not _same(key.strip(), self.metrics_key):
            raise errors.invalid_api_key()
        for pool in self.pools:
            self.telemetry.metrics.queues.update(pool.model, pool.queue_snapshot)
            for name, channel in pool.channels.items():
                stats = await channel.stats()
                if stats is None:
                    self.telemetry.metrics.engines.remove(name)
                else:
                    self.telemetry.metrics.engines.update(stats)
        return PlainTextResponse(self.telemetry.metrics.render(), media_type=CONTENT_TYPE)


class _Inference:
    """A route as a plain ASGI app: the connection is ours, from the body to the client's leaving."""

    def __init__(self, gateway: GatewayApp, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.infer(self._endpoint, Connection(scope, receive, send))


async def _reserve_and_respond(life: RequestLife, connection: Connection) -> None:
    await life.reserve()
    await life.respond(connection)


async def _send_error(connection: Connection, error: ApiError, headers: dict[str, str]) -> None:
    """Before the first byte an error response, after it one event and the end of the stream."""
    try:
        if connection.status is None:
            await connection.send_json(error.status, error.to_body(), {**headers, **error.headers()})
        else:
            await connection.send_event(error.to_sse())
            await connection.end_stream()
    except OSError:
        logger.debug("the client left before its error")


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.to_body(), error.status, error.headers())


async def _api_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)
