"""The gateway: the ASGI app behind Serve's ingress. Routes, keys, and what every request has in common."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.admin import Admin
from serve_app.api import errors
from serve_app.api.body import parse_body
from serve_app.api.endpoints import ParsedRequest, parse_chat, parse_completion
from serve_app.api.errors import ApiError
from serve_app.api.schemas import ChatCompletionRequest, CompletionRequest
from serve_app.client_address import ClientAddresses
from serve_app.connection import ClientGoneError, CloseUnread, Connection
from serve_app.idempotent import REPLAYED, Repeatable, idempotency_key
from serve_app.logins import Logins, bearer
from serve_app.pool import ModelPool
from serve_app.request import RequestLife
from serve_app.routes import Routes
from serve_app.settings import SloSettings
from serve_app.targets import read_targets
from serve_app.telemetry.gateway import GatewayTelemetry
from serve_app.telemetry.records import Outcome, RequestRecord, bounded
from serve_app.telemetry.tracing import outgoing_headers
from tenancy.directory import Identity, TenantDirectory
from tenancy.models import Tenant
from tenancy.quota import LEASE_MS, QuotaStore, QuotaUnavailable

logger = logging.getLogger(__name__)

RENEW_HOLDS_SECONDS = LEASE_MS / 3000
CLIENT_CLOSED_REQUEST = 499

OFF_LOOP_BYTES = 16 * 1024
"""Larger bodies are parsed and tokenised in a thread, one of a tenant at a time: nobody's stream waits for them."""

Endpoint = Literal["chat", "completions"]
SCOPES = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/usage", "/tokenize", "/detokenize"]
"""Routes that a key may be limited to."""
BODY_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"})
"""Those that read a body with the API's own limits."""
T = TypeVar("T")


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
        cors_origins: list[str],
        addresses: ClientAddresses,
        max_failed_logins: int | None,
    ) -> None:
        self.pools = pools
        self.directory = directory
        self.quota = quota
        self.telemetry = telemetry
        self._by_name = {name: pool for pool in pools for name in pool.names}
        self.max_request_bytes = max_request_bytes
        self.logins = Logins(addresses, max_failed_logins, self._gateways)
        self.admin = Admin(directory, [pool.model for pool in pools], SCOPES, self.logins)
        self._waiting_timeouts = waiting_timeouts
        self.metrics_key: str | None = None
        self.slo = SloSettings()
        self._routes = Routes(self, version)
        self._cors_origins = cors_origins
        self._off_loop: dict[str, asyncio.Lock] = {}
        self._live: set[RequestLife] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._renewal = asyncio.create_task(self._renew_holds())

    def asgi(self) -> Starlette:
        """The app."""
        cors = Middleware(
            CORSMiddleware,
            allow_origins=self._cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", _Inference(self, "chat"), methods=["POST"]),
                Route("/v1/completions", _Inference(self, "completions"), methods=["POST"]),
                *self._routes.routes(),
                *self.admin.routes(),
            ],
            middleware=[Middleware(CloseUnread, but=BODY_ROUTES), *([cors] if self._cors_origins else [])],
            exception_handlers={
                404: lambda request, error: _error_response(errors.not_found()),
                405: _method_not_allowed,
                ApiError: _api_error_response,
                Exception: lambda request, error: _error_response(errors.internal_error()),
            },
        )
        app.router.redirect_slashes = False
        return app

    @property
    def ready(self) -> bool:
        """A request that came now could be served."""
        quota_ready = self.quota is not None and self.quota.healthy
        return quota_ready and self.directory.complete and all(pool.ready for pool in self.pools)

    def _gateways(self) -> int:
        return 1 if self.quota is None else self.quota.gateways or 1

    @property
    def live_requests(self) -> int:
        """Requests that have been read and not been settled."""
        return len(self._live) + len(self._background)

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
            answer = asyncio.create_task(_respond(parsed_life, connection))
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
        identity = self.identify(connection.scope, record.route, record)
        tenant = identity.tenant
        raw = await connection.read_body(self.max_request_bytes)
        pool, parsed = await self.off_loop(
            tenant, len(raw), lambda: self._parse(endpoint, raw, tenant, record)
        )
        record.validated_ms = record.now_ms()
        if self.quota is None:
            raise ApiError("quota_store_unavailable", "The quota store is not ready. Try again shortly.")
        key = idempotency_key(connection, parsed.stream)
        life = RequestLife(
            record,
            identity,
            pool,
            self.quota,
            self.directory.cache_namespace(tenant),
            parsed,
            read_targets(connection.headers, parsed.service_tier, tenant, self.slo.itl_p95_ms),
            self._waiting_timeouts[pool.model],
        )
        if key is not None:
            digest = partial(self.directory.request_digest, tenant)
            life.idempotency = Repeatable(
                self.quota.guarded, tenant.id, digest(key.encode()), digest(endpoint.encode() + b"\0" + raw)
            )
        return life

    def _parse(
        self, endpoint: Endpoint, raw: bytes, tenant: Tenant, record: RequestRecord
    ) -> tuple[ModelPool, ParsedRequest]:
        kind: type[ChatCompletionRequest] | type[CompletionRequest]
        kind = ChatCompletionRequest if endpoint == "chat" else CompletionRequest
        body = parse_body(raw, kind)
        record.model = body.model
        pool = self.pool(body.model, tenant)
        record.model = pool.model
        if isinstance(body, ChatCompletionRequest):
            return pool, parse_chat(body, pool.text, pool.max_model_len)
        return pool, parse_completion(body, pool.text, pool.max_model_len)

    async def off_loop(self, tenant: Tenant, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on a body of `size` bytes, without holding up the others where that is large."""
        if size <= OFF_LOOP_BYTES:
            return work()
        async with self._off_loop.setdefault(tenant.id, asyncio.Lock()):
            return await asyncio.to_thread(work)

    def identify(self, scope: Scope, route: str, record: RequestRecord | None = None) -> Identity:
        """Identity comes from the key alone. Raises ApiError 401, 403, 429 or 503."""
        key = bearer(Headers(scope=scope))
        identity = self.directory.authenticate(key) if key else None
        if not self.directory.complete:  # a key may have been revoked, or made
            raise ApiError("quota_store_unavailable", "The server is not ready. Try again shortly.")
        if key:
            self.logins.check(scope, None if identity is None else identity.tenant.id)
        if identity is None:
            raise errors.invalid_api_key()
        if record is not None:
            record.tenant = identity.tenant.id
            record.key_fingerprint = self.directory.fingerprint(key)
            record.authenticated_ms = record.now_ms()
        if not identity.may_call(route):
            raise errors.route_not_allowed()
        return identity

    def pool(self, model: str, tenant: Tenant) -> ModelPool:
        """The pool behind a name. Raises ApiError 404, or 403 where the tenant may not use it."""
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
        if life is not None and (life.complete or life.replayed) and error is None:
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


class _Inference:
    """A route as a plain ASGI app: the connection is ours, from the body to the client's leaving."""

    def __init__(self, gateway: GatewayApp, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.infer(self._endpoint, Connection(scope, receive, send))


async def _respond(life: RequestLife, connection: Connection) -> None:
    """Steps 3 to 8, or the answer of the first run with this idempotency key."""
    if life.idempotency is None:
        await life.reserve()
        await life.respond(connection)
        return
    run = await life.idempotency.begin()
    if isinstance(run, bytes):
        life.replayed = True
        await connection.send_content(200, run, {**life.headers, **REPLAYED})
        return
    connection.before_answer = run.answer
    try:
        await life.reserve()
        await life.respond(connection)
    finally:
        await run.end()


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


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.to_body(), error.status, error.headers())


async def _method_not_allowed(request: Request, error: Exception) -> Response:
    response = _error_response(errors.method_not_allowed())
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})  # Allow
    return response


async def _api_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)
