"""The gateway's process: binds the port before anything else, then serves HTTP over the client library.

`run` is the entry point in `octavo.gateway`; `build_app` makes the application over any engine.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import ssl
import sys
import time
from contextlib import closing, contextmanager, nullcontext, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.core.client.client import Client
from octavo.core.messages import Role
from octavo.core.pages import settle
from octavo.core.plugins import PluginError, resolve
from octavo.core.rundir import read
from octavo.core.trace.emit import Emitter
from octavo.plugins.metrics.service import Metrics
from octavo.plugins.openai.answer import Engine, Load, error_response
from octavo.plugins.openai.auth import PUBLIC, Auth
from octavo.plugins.openai.connection import Held, connection_of
from octavo.plugins.openai.errors import ApiError
from octavo.plugins.openai.routes import IGNORED_HEADER, Api
from octavo.plugins.openai.site import Site, listed
from octavo.plugins.openai.speech import Manners
from octavo.plugins.openai.tenants.account import Accounts
from octavo.plugins.openai.tenants.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.core.config.schema import Config, ServerConfig

BACKLOG = 1024
FAREWELL_S = 3
"""How long open connections may take to read their last words once the daemon stops."""

KERNEL_BYTES = 128 * 1024
"""What the kernel keeps of a connection's output; left alone, it would go up to megabytes."""

BEAT_S = 1.0
"""How often the supervisor sees that the event loop turns."""

SHOWN_HEADERS = ("x-request-id", IGNORED_HEADER, "retry-after")
"""What pages from elsewhere may read of an answer beside its body."""

CANNOT_BIND = 78
"""Exit code (EX_CONFIG): starting this process again will not help."""


def build_app(
    engine: Engine, config: Config, metrics: Metrics | None = None, accounts: Accounts | None = None
) -> Starlette:
    """The application, with `/metrics` and `/dashboard` if there are any; without `accounts` nobody needs a key. Every
    error it answers with has OpenAI's shape.

    Raises `PluginError`."""
    server = config.server
    name = server.reasoning_parser
    reasoning = None if name is None else resolve("octavo.reasoning_parser", name)
    api = Api(engine, config, Manners(resolve("octavo.tool_parser", server.tool_parser), reasoning))
    routes = [*api.routes(), *(metrics.routes() if metrics else [])]
    middleware = [Middleware(RequestId), Middleware(Auth, accounts=accounts, routes=routes)]
    if accounts is None:
        middleware.insert(1, Middleware(Site, server=server, public=PUBLIC))
    if origins := listed(server.origins):
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=SHOWN_HEADERS,
        )
        middleware.insert(1, cors)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: _known,
            HTTPException: _http,
            ClientDisconnect: _gone,
            Exception: _bug,
        },
    )
    app.state.load = api.load_of_answers
    app.middleware_stack = app.build_middleware_stack()  # now: a route that nobody may use is found here
    return app


class RequestId:
    """Gives every request an id, for the engine and the API. A client's own `x-request-id` (which comes back in the
    answer's header) is its trace id, if no W3C `traceparent` says another."""

    LONGEST = 200

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received_ns = time.monotonic_ns()
        request_id = secrets.token_hex(12)
        headers = Request(scope).headers
        shown_id = headers.get("x-request-id", "")[: self.LONGEST] or request_id
        trace_id = trace_of(headers.get("traceparent", "")) or shown_id
        scope.setdefault("state", {}).update(request_id=request_id, trace_id=trace_id, received_ns=received_ns)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = shown_id
            await send(message)

        await self._app(scope, receive, with_id)


def trace_of(traceparent: str) -> str | None:
    """The trace id in a `traceparent` header (W3C Trace Context, section 3.2); None if it is not valid."""
    found = re.fullmatch(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", traceparent.strip())
    if found is None or not found[1].strip("0") or not found[2].strip("0"):
        return None
    return None if traceparent.startswith("00") and found[3] else found[1]


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    if status == HTTPStatus.NOT_FOUND:
        known = ApiError(status, f"there is no {request.method} {request.url.path[:200]}", code="unknown_route")
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        known = ApiError(status, f"{request.method} is not for {request.url.path[:200]}", code="method_not_allowed")
    else:
        known = ApiError(status, error.detail)
    response = error_response(known)
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    """A fault of our own ends this request alone; starlette raises it again for the log."""
    return error_response(ApiError(500, "the gateway failed on this request: see the daemon's log", code="internal"))


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is for the supervisor to say."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def make_server(app: Starlette, config: ServerConfig, held: Held | None = None) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http=connection_of(config.slow_reader_s, held or Held()),
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=FAREWELL_S,
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
        )
    )


def bind(config: ServerConfig, port: int) -> socket.socket:
    """The listening socket; OSError says what is wrong with the address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        listener.bind((config.host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def run(config: Config, run_dir: Path, generation: int) -> None:
    """The gateway actor's life. Exits with `CANNOT_BIND` at once if its address is taken, or is not safe."""
    if (why := unsafe(config.server) or without_tls(config.server)) is not None:
        print(f"octavo: {why}", file=sys.stderr)
        sys.exit(CANNOT_BIND)
    port = config.server.port or _former_port(run_dir, generation)
    try:
        listener = bind(config.server, port)
    except OSError as error:
        where = f"{config.server.host}:{port}"
        print(f"octavo: cannot listen on {where}: {error.strerror}. Choose another with --port.", file=sys.stderr)
        sys.exit(CANNOT_BIND)
    options: dict[str, Any] = {"use_uvloop": True}
    with listener:
        anyio.run(_serve, config, run_dir, generation, listener, backend="asyncio", backend_options=options)


def unsafe(server: ServerConfig) -> str | None:
    """Why nobody should listen there: others could reach it, and everything is open."""
    if server.keys_file is not None or server.open or server.host == "localhost":
        return None
    with suppress(ValueError):  # a name: whoever it is, it may be others
        if ipaddress.ip_address(server.host).is_loopback:
            return None
    return (
        f"{server.host} can be reached by others, and there are no API keys. Make some (octavo keys create NAME "
        "--file FILE) and set server.keys_file, or set server.open = true to serve everyone."
    )


def without_tls(server: ServerConfig) -> str | None:
    """Why HTTPS cannot be spoken, if it is wanted."""
    certificate, key = server.tls_certificate, server.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        return "server.tls_certificate and server.tls_key are needed both, or none of them"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_passphrase)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        return f"{certificate} with {key} cannot be used for TLS: {error}"
    return None


def _no_passphrase() -> str:
    """Nobody is there to type one."""
    raise ValueError("the key has a passphrase; write it without one: openssl pkey -in KEY -out PLAIN")


def _former_port(run_dir: Path, generation: int) -> int:
    """With port 0, where this gateway's predecessor listened: its clients come back there."""
    info = read(run_dir)
    if generation == 1 or info is None or info.address is None:
        return 0
    return urlsplit(info.address).port or 0


async def _serve(config: Config, run_dir: Path, generation: int, listener: socket.socket) -> None:
    """Until the daemon ends; open answers are told so by their streams' errors."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.server.tls_certificate is None else "https"
    name, address = f"gateway-{generation}", f"{scheme}://{_bracketed(host)}:{port}"
    with (
        _accounts(config.server) as accounts,
        Emitter(run_dir, Role.GATEWAY, config.trace, generation=generation) as events,
    ):
        connection = Client.connect(run_dir, role=Role.GATEWAY, name=name, address=address, report=events.emit)
        async with connection as client, anyio.create_task_group() as tasks:
            try:
                metrics = Metrics.of_run(run_dir)
                app = build_app(metrics.meter(client), config, metrics, accounts)
                held = Held()
                server = make_server(app, config.server, held)
            except PluginError as error:
                print(f"octavo: {error}", file=sys.stderr)
                sys.exit(CANNOT_BIND)
            tasks.start_soon(_stop_with_daemon, client, server)
            tasks.start_soon(_beat, client, app.state.load, held)
            if accounts is not None:
                accounts.ring.on_weights = client.weigh
                client.weigh(accounts.ring.weights)
                tasks.start_soon(accounts.ledger.run)
            settle()
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()


@contextmanager
def _accounts(server: ServerConfig) -> Iterator[Accounts | None]:
    """Those of the file of keys, if there is one; without it the process ends here."""
    if server.keys_file is None:
        yield None
        return
    try:
        accounts = Accounts(Path(server.keys_file))
    except (StoreError, OSError) as error:
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(CANNOT_BIND)
    with closing(accounts):
        yield accounts


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _beat(client: Client, load: Load, held: Held) -> None:
    while True:
        client.beat({"buffer_most": held.most, "backlog_most": load.backlog_most})
        await anyio.sleep(BEAT_S)


async def _stop_with_daemon(client: Client, server: Server) -> None:
    await client.wait_ended()
    server.should_exit = True
