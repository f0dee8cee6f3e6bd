"""The routes beside inference: models, tokens, health, version, metrics and the API's description."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.api import errors
from serve_app.api.body import parse_body
from serve_app.api.errors import ApiError
from serve_app.api.openapi import openapi_document
from serve_app.api.responses import ModelCard, model_list
from serve_app.api.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from serve_app.connection import ClientGoneError, Connection
from serve_app.logins import bearer
from serve_app.quota_answers import usage_of_day
from serve_app.telemetry.metrics import CONTENT_TYPE
from tenancy.guarded_redis import QuotaUnavailable
from tenancy.models import Tenant

if TYPE_CHECKING:
    from serve_app.gateway import GatewayApp


class Routes:
    """Handlers over one gateway. `open` ones need no key and say nothing but their one word."""

    def __init__(self, gateway: GatewayApp, version: str) -> None:
        self._gateway = gateway
        self._version = version
        self._started = int(time.time())
        self._document = openapi_document(version)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/v1/usage", self._usage, methods=["GET"]),
            Route("/tokenize", JsonRoute(self._tokenize), methods=["POST"]),
            Route("/detokenize", JsonRoute(self._detokenize), methods=["POST"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._health, methods=["GET"]),
            Route("/live", self._alive, methods=["GET"]),
            Route("/version", self._version_route, methods=["GET"]),
        ]

    async def _models(self, request: Request) -> Response:
        return JSONResponse(model_list(self._cards(self._tenant(request, "/v1/models"))))

    async def _model(self, request: Request) -> Response:
        tenant = self._tenant(request, "/v1/models")
        name = request.path_params["model"]
        self._gateway.pool(name, tenant)
        return JSONResponse(next(card.to_dict() for card in self._cards(tenant) if card.id == name))

    async def _usage(self, request: Request) -> Response:
        """What the tenant itself has used, by day and model."""
        tenant, quota = self._tenant(request, "/v1/usage"), self._gateway.quota
        try:
            if quota is None:
                raise QuotaUnavailable("not there yet", maybe_applied=False)
            days = await quota.usage(tenant.id)
        except QuotaUnavailable:
            raise ApiError(
                "quota_store_unavailable", "The usage cannot be read. Try again shortly."
            ) from None
        return JSONResponse({"object": "list", "data": [usage_of_day(day) for day in days]})

    async def _tokenize(self, connection: Connection) -> dict[str, Any]:
        tenant, raw = await self._body(connection, "/tokenize")

        def work() -> dict[str, Any]:
            body = parse_body(raw, TokenizeRequest)
            pool = self._gateway.pool(body.model, tenant)
            return tokenize(body, pool.text, pool.max_model_len)

        return await self._gateway.off_loop(tenant, len(raw), work)

    async def _detokenize(self, connection: Connection) -> dict[str, Any]:
        tenant, raw = await self._body(connection, "/detokenize")

        def work() -> dict[str, Any]:
            body = parse_body(raw, DetokenizeRequest)
            return detokenize(body, self._gateway.pool(body.model, tenant).text)

        return await self._gateway.off_loop(tenant, len(raw), work)

    async def _openapi(self, request: Request) -> Response:
        self._tenant(request, "/openapi.json")
        return JSONResponse(self._document)

    async def _health(self, request: Request) -> Response:
        ready = self._gateway.ready
        return JSONResponse({"status": "ok" if ready else "unavailable"}, 200 if ready else 503)

    async def _alive(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _version_route(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _metrics(self, request: Request) -> Response:
        """Metrics of this gateway and the engines it hears from, for the holder of the metrics key."""
        key, expected = bearer(request.headers), self._gateway.metrics_key
        allowed = expected is not None and _same(key, expected)
        if key:
            self._gateway.logins.check(request.scope, "+metrics" if allowed else None)
        if not allowed:
            raise errors.invalid_api_key()
        metrics, quota = self._gateway.telemetry.metrics, self._gateway.quota
        metrics.set_work(self._gateway.live_requests, len(asyncio.all_tasks()))
        if quota is not None:
            metrics.quota.update(quota.healthy, quota.admitted_in_outages, quota.owed)
        for pool in self._gateway.pools:
            metrics.queues.update(pool.model, pool.queue.snapshot)
            for name, channel in pool.channels.items():
                stats = await channel.stats()
                if stats is None:
                    metrics.engines.remove(name)
                else:
                    metrics.engines.update(stats)
        return PlainTextResponse(metrics.render(), media_type=CONTENT_TYPE)

    def _tenant(self, request: Request, route: str) -> Tenant:
        return self._gateway.identify(request.scope, route).tenant

    async def _body(self, connection: Connection, route: str) -> tuple[Tenant, bytes]:
        tenant = self._gateway.identify(connection.scope, route).tenant
        return tenant, await connection.read_body(self._gateway.max_request_bytes)

    def _cards(self, tenant: Tenant) -> list[ModelCard]:
        return [
            ModelCard(name, self._started, pool.max_model_len)
            for pool in self._gateway.pools
            if tenant.models is None or set(pool.names) & set(tenant.models)
            for name in pool.names
        ]


class JsonRoute:
    """A route whose body is read with our own limits, as a plain ASGI app. The handler returns the answer's body."""

    def __init__(self, handler: Callable[[Connection], Awaitable[dict[str, Any]]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send)
        try:
            await connection.send_json(200, await self._handler(connection), {})
        except ApiError as error:
            await connection.send_json(error.status, error.to_body(), error.headers())
        except (ClientGoneError, OSError):
            pass


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
