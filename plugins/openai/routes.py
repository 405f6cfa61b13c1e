"""The routes: each decodes, asks the engine and encodes. What is asked is in `chat` and its neighbours,
what is answered in `responses`."""

from __future__ import annotations

import time
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from octavo.core.client.stream import ClientError
from octavo.plugins.openai import spec
from octavo.plugins.openai.answer import Answer, Caller, Engine, Load
from octavo.plugins.openai.body import convert, parse
from octavo.plugins.openai.chat import decode_chat, decode_responses
from octavo.plugins.openai.completion import decode_completion
from octavo.plugins.openai.errors import ApiError, from_client
from octavo.plugins.openai.responses import About, ChatReply, CompletionReply
from octavo.plugins.openai.responses_api import ResponsesReply
from octavo.plugins.openai.tokens import decode_detokenize, decode_tokenize
from octavo.plugins.openai.types import LoadAdapterBody, UnloadAdapterBody

if TYPE_CHECKING:
    from octavo.core.config.schema import Config
    from octavo.core.messages import Facts
    from octavo.plugins.openai.asked import Asked
    from octavo.plugins.openai.speech import Manners
    from octavo.plugins.tools.contract import Form

IGNORED_HEADER = "x-octavo-ignored-fields"
IGNORED_SHOWN = 20
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


Kind: TypeAlias = type[ChatReply | CompletionReply | ResponsesReply]


class Api:
    """The endpoints over one engine."""

    def __init__(self, engine: Engine, config: Config, manners: Manners) -> None:
        self._engine = engine
        self._config = config
        self._manners = manners
        self._max_body_bytes = config.server.max_body_bytes
        self._created = int(time.time())
        self.load_of_answers = Load()
        self._document = msgspec.json.encode(spec.document(metadata.version("octavo")))

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.model, methods=["GET"]),
            Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.health, methods=["GET"]),
            Route("/live", self.ping, methods=["GET"]),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/model_info", self.model_info, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> Response:
        asked = decode_chat(await self._body(request), self._form)
        return self._answer(request, asked, ChatReply)

    async def completions(self, request: Request) -> Response:
        asked = decode_completion(await self._body(request))
        return self._answer(request, asked, CompletionReply)

    async def responses(self, request: Request) -> Response:
        asked = decode_responses(await self._body(request), self._form)
        return self._answer(request, asked, ResponsesReply)

    async def page(self, request: Request) -> Response:
        """A conversation in the browser; it loads nothing from anywhere."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    async def load(self, request: Request) -> Response:
        return _json({"server_load": self.load_of_answers.open})

    async def models(self, request: Request) -> Response:
        facts = self._facts()
        cards = [self._card(facts), *(self._card(facts, name) for name in self._engine.adapters)]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        facts = self._facts()
        return _json(self._card(facts, self._adapter(request.path_params["id"], facts)))

    async def load_adapter(self, request: Request) -> Response:
        self._check_adapter_routes()
        asked, ignored = convert(parse(await self._body(request)), LoadAdapterBody)
        await self._set_adapter(asked.lora_name, asked.lora_path, replace=asked.load_inplace)
        return _done(f"Success: LoRA adapter '{asked.lora_name}' added successfully.", ignored)

    async def unload_adapter(self, request: Request) -> Response:
        self._check_adapter_routes()
        asked, ignored = convert(parse(await self._body(request)), UnloadAdapterBody)
        await self._set_adapter(asked.lora_name)
        return _done(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.", ignored)

    async def _set_adapter(self, name: str, path: str = "", *, replace: bool = False) -> None:
        self._facts()
        try:
            await self._engine.set_adapter(name, path, replace=replace)
        except ClientError as error:
            raise from_client(error, "lora_path" if path else "lora_name") from error

    async def tokenize(self, request: Request) -> Response:
        """Also says how long a sequence may be."""
        asked = decode_tokenize(await self._body(request))
        facts = self._facts()
        self._adapter(asked.model, facts)
        try:
            ids = await self._engine.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens)
        except ClientError as error:
            raise from_client(error) from error
        body = {"count": len(ids), "max_model_len": facts.context, "tokens": ids}
        return _json(body, _ignored(asked.ignored))

    async def detokenize(self, request: Request) -> Response:
        asked = decode_detokenize(await self._body(request))
        self._adapter(asked.model, self._facts())
        try:
            text = await self._engine.detokenize(asked.ids)
        except ClientError as error:
            raise from_client(error) from error
        return _json({"prompt": text}, _ignored(asked.ignored))

    async def tokenizer_info(self, request: Request) -> Response:
        """As vLLM has it: tokenizer_config.json, with the chat template."""
        try:
            return _json(await self._engine.tokenizer_config())
        except ClientError as error:
            raise from_client(error) from error

    async def health(self, request: Request) -> Response:
        """200 only when a step can run now."""
        health = self._engine.health()
        if not health.ok:
            raise _unavailable(health.reason)
        return _json({"status": "ok"})

    async def ping(self, request: Request) -> Response:
        """This process lives; whether a step can run is for `health` to say."""
        return Response()

    async def server_info(self, request: Request) -> Response:
        facts = self._facts()
        return _json(
            {
                "version": metadata.version("octavo"),
                "model_id": facts.model_id,
                "context": facts.context,
                "kv_tokens": facts.total_blocks * facts.block_size,
                "block_size": facts.block_size,
                "max_sequences": self._config.scheduler.max_sequences,
                "chunk_budget": self._config.scheduler.chunk_budget,
                "policies": msgspec.to_builtins(self._config.policies),
                "executor": facts.executor or self._config.executor.kind,
            }
        )

    async def model_info(self, request: Request) -> Response:
        facts = self._facts()
        return _json(
            {
                "model_path": facts.model_id,
                "served_model_name": facts.model_id,
                "is_generation": True,
                "max_model_len": facts.context,
                "vocab_size": facts.vocab_size,
            }
        )

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Of all tenants. Says how many blocks are free now, and how many when what uses them ends."""
        try:
            state = await self._engine.cache(flush=True)
        except ClientError as error:
            raise from_client(error) from error
        return _json({"freed": state.freed, "in_use": state.in_use})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def embeddings(self, request: Request) -> Response:
        facts = self._facts()
        message = f"{facts.model_id!r} generates text; embeddings are not served"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, param="model", code="unsupported_endpoint")

    async def version(self, request: Request) -> Response:
        return _json({"version": metadata.version("octavo")})

    def _answer(
        self, request: Request, asked: Asked, kind: type[ChatReply | CompletionReply | ResponsesReply]
    ) -> Response:
        facts = self._facts()
        adapter = self._adapter(asked.model, facts)
        pinned = self._engine.adapters[adapter] if adapter else ""  # of all prompts and beams of this call
        asked = asked._replace(params=msgspec.structs.replace(asked.params, adapter=pinned))
        request_id: str = request.state.request_id
        about = About(
            id=kind.prefix + request_id,
            created=int(time.time()),
            model=adapter or facts.model_id,
            fingerprint=f"fp_{metadata.version('octavo')}_{facts.cache_seed.hex()[:10]}",
        )
        reply = kind(about, asked, self._manners)
        state = request.state
        caller = Caller(
            request_id,
            state.trace_id,
            state.account,
            received_ns=state.received_ns,
            buffer_bytes=self._config.server.stream_buffer_bytes,
            load=self.load_of_answers,
        )
        return Answer(self._engine, asked, reply, caller, _ignored(asked.ignored))

    async def _body(self, request: Request) -> bytes:
        """The body, if it is JSON and not too large."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind not in ("application/json", "application/x-www-form-urlencoded"):  # the latter is curl's habit
            message = f"the body must be application/json, not {kind[:80]!r}"
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_media_type")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                message = f"the body has more than {self._max_body_bytes} bytes (server.max_body_bytes)"
                raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
        return bytes(body)

    @property
    def _form(self) -> Form | None:
        """How calls are marked, where the engine keeps to a grammar."""
        form: Form | None = getattr(self._manners.tools, "form", None)
        serves = self._engine.facts.serves if self._engine.facts is not None else ()
        return form if form and form.opening and form.closing and "grammar" in serves else None

    def _facts(self) -> Facts:
        facts = self._engine.facts
        if facts is None:
            raise _unavailable(self._engine.health().reason or "the model is being loaded")
        return facts

    def _adapter(self, model: str | None, facts: Facts) -> str:
        """The adapter that this name stands for; "" is the model itself, which is also meant where there is no name."""
        if model is None or model == facts.model_id:
            return ""
        if model in self._engine.adapters:
            return model
        known = ", ".join(map(repr, (facts.model_id, *self._engine.adapters)))
        message = f"the model {model[:200]!r} is not served here; what is: {known}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def _check_adapter_routes(self) -> None:
        if not self._config.server.adapter_routes:
            message = "adapters are not loaded over HTTP here: the server's server.adapter_routes is false"
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="adapter_routes_off")

    def _card(self, facts: Facts, adapter: str = "") -> dict[str, Any]:
        return {
            "id": adapter or facts.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "parent": facts.model_id if adapter else None,
            "max_model_len": facts.context,
        }


def _unavailable(reason: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, reason, code="service_unavailable")


def _ignored(paths: list[str]) -> dict[str, str]:
    """The header that tells which fields had no effect. Names come from outside: only printable ASCII goes in."""
    if not paths:
        return {}
    shown = [ascii(path)[1:-1][:64] for path in paths[:IGNORED_SHOWN]]
    more = [f"and {len(paths) - IGNORED_SHOWN} more"] if len(paths) > IGNORED_SHOWN else []
    return {IGNORED_HEADER: ", ".join(shown + more)}


def _done(message: str, ignored: list[str]) -> Response:
    return PlainTextResponse(message, headers=_ignored(ignored))


def _json(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
