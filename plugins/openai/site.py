"""Which web pages may ask: without keys, whoever reaches the address may do everything, and that is also every page
that is open in a browser of this machine.

    Host      a page whose own name was made to point here (DNS rebinding) says that name. Taken are addresses (a page
              cannot choose what those mean), localhost, `server.host` and the names in `server.hosts`
    Origin    a page from elsewhere says where it is from (Fetch standard, section 3.1). Taken are those from here, and
              the ones in `server.origins`, which CORS then lets read the answers

Programs that are no browsers send an address or localhost, and no Origin. What costs nothing and shows nothing is for
everyone; with keys all this is not asked, since no page has one unless its user gave it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request

from octavo.plugins.openai.answer import error_response
from octavo.plugins.openai.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo.core.config.schema import ServerConfig

_DEFAULT_PORTS = (":80", ":443")


class Site:
    """Lets a request through, or answers 403."""

    def __init__(self, app: ASGIApp, server: ServerConfig, public: Collection[str]) -> None:
        self._app = app
        self._public = public
        self._open = server.open
        self._hosts = {"localhost", server.host.lower(), *listed(server.hosts)}
        self._origins = frozenset(listed(server.origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._public:
            headers = Request(scope).headers
            error = self._foreign(headers.get("host", ""), headers.get("origin", ""))
            if error is not None:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _foreign(self, host: str, origin: str) -> ApiError | None:
        if host and not self._open and not self._known(host):
            message = f"{host[:200]!r} is not a name of this server; server.hosts can list it"
            return ApiError(HTTPStatus.FORBIDDEN, message, code="foreign_host")
        if origin and _place(origin.partition("://")[2]) != _place(host) and origin.lower() not in self._origins:
            message = f"pages from {origin[:200]!r} may not ask this server; server.origins can list it"
            return ApiError(HTTPStatus.FORBIDDEN, message, code="foreign_origin")
        return None

    def _known(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            if name in self._hosts or name.endswith(".localhost"):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def listed(names: str) -> list[str]:
    """Those in a configured list, in lower case."""
    return [name.strip().lower() for name in names.split(",") if name.strip()]


def _place(authority: str) -> str:
    """Where it is, as `Host` and `Origin` may both spell it."""
    place = authority.strip().lower()
    return next((place.removesuffix(port) for port in _DEFAULT_PORTS if place.endswith(port)), place)
