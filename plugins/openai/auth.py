"""Who may do what: one rule for every route, before any of them sees the request.

    PUBLIC    no key: whether it lives, its version, what the API looks like
    NEEDS     a key with one of these scopes (one with `admin` may do everything)

A route that is in neither stops the gateway's start; a path that is no route is told only to who has a key. Without a
file of keys everyone is the same nameless tenant, and may do everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.routing import Match, Route

from octavo.plugins.openai.answer import error_response
from octavo.plugins.openai.errors import ApiError, limited, unauthorized
from octavo.plugins.openai.tenants.account import Account, Accounts, Limited
from octavo.plugins.openai.tenants.keys import ADMIN, INFER, READ, Key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PUBLIC = frozenset({"/", "/health", "/ready", "/live", "/ping", "/version", "/openapi.json", "/dashboard"})

_INFER = frozenset({INFER})
_LOOK = frozenset({INFER, READ})
_READ = frozenset({READ})
_ADMIN = frozenset({ADMIN})

NEEDS = {
    "/v1/chat/completions": _INFER,
    "/v1/completions": _INFER,
    "/v1/responses": _INFER,
    "/v1/embeddings": _INFER,
    "/tokenize": _INFER,
    "/detokenize": _INFER,
    "/v1/models": _LOOK,
    "/v1/models/{id:path}": _LOOK,
    "/model_info": _LOOK,
    "/tokenizer_info": _LOOK,
    "/load": _LOOK,
    "/server_info": _READ,
    "/metrics": _READ,
    "/dashboard/data": _READ,
    "/reset_prefix_cache": _ADMIN,
    "/v1/load_lora_adapter": _ADMIN,
    "/v1/unload_lora_adapter": _ADMIN,
}
"""By route: a key with any of these scopes may use it."""

GENERATES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Where a request is one in the ledger, however it ends."""


class Auth:
    """Lets a request through with its account in the state of its scope, or answers 401, 403 or 429."""

    def __init__(self, app: ASGIApp, accounts: Accounts | None, routes: Sequence[Route]) -> None:
        if unlisted := {route.path for route in routes} - PUBLIC - NEEDS.keys():
            raise ValueError(f"nobody has said who may use {', '.join(sorted(unlisted))}")
        self._app = app
        self._accounts = accounts
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["account"] = None
        path = self._path(scope)
        if self._accounts is None or path in PUBLIC:
            await self._app(scope, receive, send)
            return
        try:
            account = self._accounts.open(self._known(Request(scope), path, self._accounts))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._serve(account, path, scope, receive, send)

    async def _serve(self, account: Account, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def with_limits(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(account.headers())
            await send(message)

        scope["state"]["account"] = account
        try:
            try:
                if scope["method"] == "POST":
                    account.take_request()
            except Limited as error:
                await error_response(limited(error))(scope, receive, with_limits)
            else:
                await self._app(scope, receive, with_limits)
        finally:
            if path in GENERATES and scope["method"] == "POST":  # if its answer has not ended it
                account.end("failed" if not status or status >= HTTPStatus.INTERNAL_SERVER_ERROR else "refused")

    def _known(self, request: Request, path: str, accounts: Accounts) -> Key:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise unauthorized("there is no API key: send Authorization: Bearer KEY", "missing_api_key")
        key = accounts.find(secret.strip())
        if key is None:
            raise unauthorized("this API key is not known here", "invalid_api_key")
        if key.expired(accounts.wall()):
            raise unauthorized(f"the API key {key.name!r} has expired", "expired_api_key")
        needed = NEEDS.get(path)  # None: there is no such route, which anybody with a key may be told
        if needed is not None and not key.may(needed):
            scopes = " or ".join(sorted(needed | _ADMIN))
            message = f"{request.url.path} is for keys with the scope {scopes}, which {key.name!r} has not"
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="missing_scope")
        return key

    def _path(self, scope: Scope) -> str:
        """That of the route which will serve it, asked of the routes themselves: what they take for theirs is more than
        their very path (a newline at its end too)."""
        path: str = scope["path"]
        if path in NEEDS or path in PUBLIC:
            return path
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), path)
