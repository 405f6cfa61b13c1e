"""Who may do what: one rule for every route, before any of them sees the request.

    public    no key: whether it lives, its version, what the API looks like
    admin     a key with `admin`: what is about everyone
    the rest  any key; what is posted counts against its limits

Without a keys file everyone is the same nameless tenant, and may do everything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.requests import Request

from octavo.core.trace.log import log
from octavo.plugins.openai.answer import error_response
from octavo.plugins.openai.errors import ApiError
from octavo.plugins.openai.keys import Key, KeysError, digest, load
from octavo.plugins.openai.limits import Allowance

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PUBLIC = frozenset({"/", "/health", "/ping", "/version", "/openapi.json", "/dashboard"})
ADMIN = frozenset({"/metrics", "/dashboard/data", "/server_info"})


class Keys:
    """The keys that hold now: those of the file as it is."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `KeysError`."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._keys = {key.sha256: key for key in load(path)}
        self._allowances: dict[Key, Allowance] = {}

    def find(self, secret: str) -> Key | None:
        self._refresh()
        return self._keys.get(digest(secret))

    def allowance(self, key: Key) -> Allowance:
        if (found := self._allowances.get(key)) is None:
            found = self._allowances[key] = Allowance(key.requests_per_minute, key.tokens_per_minute, self.now)
        return found

    @property
    def now(self) -> float:
        return self._clock()

    def _refresh(self) -> None:
        """A file that has become unusable changes nothing, but is complained of."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = {key.sha256: key for key in load(self._path)}
        except KeysError as error:
            log().error("the keys stay as they were", why=str(error))
            return
        known = set(self._keys.values())
        self._allowances = {key: one for key, one in self._allowances.items() if key in known}


class Auth:
    """Lets a request through with its tenant in the state of its scope, or answers 401, 403 or 429."""

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state.update(tenant="", charge=None)
        if self._keys is None or scope["path"] in PUBLIC:
            await self._app(scope, receive, send)
            return
        try:
            key = self._known(Request(scope), self._keys)
            allowance = self._keys.allowance(key)
            if scope["method"] == "POST":
                _take(allowance, self._keys.now)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        state.update(tenant=key.tenant, charge=partial(self._charge, self._keys, allowance))

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowance.headers())
            await send(message)

        await self._app(scope, receive, with_limits)

    @staticmethod
    def _charge(keys: Keys, allowance: Allowance, tokens: int) -> None:
        allowance.spend_tokens(tokens, keys.now)

    @staticmethod
    def _known(request: Request, keys: Keys) -> Key:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unauthorized("there is no API key: send Authorization: Bearer KEY", "missing_api_key")
        key = keys.find(secret.strip())
        if key is None:
            raise _unauthorized("this API key is not known here", "invalid_api_key")
        if request.url.path in ADMIN and not key.admin:
            message = f"{request.url.path} is for keys with admin, which {key.name!r} has not"
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="admin_only")
        return key


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code=code, headers={"www-authenticate": "Bearer"})


def _take(allowance: Allowance, now: float) -> None:
    refused = allowance.take_request(now)
    if refused is not None:
        what, wait = refused
        message = f"this key's {what} per minute are used up; the next can come in {wait:.1f} s"
        headers = {**allowance.headers(), "retry-after": str(math.ceil(wait))}
        raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="rate_limit_exceeded", headers=headers)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file does."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
