"""`/openapi.json`: what the API takes, written from the types that it is decoded into. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from octavo.plugins.openai.auth import PUBLIC
from octavo.plugins.openai.types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    ResponsesBody,
    TokenizeBody,
    UnloadAdapterBody,
)

_REFERENCE = "#/components/schemas/{name}"
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class Operation(NamedTuple):
    """What one path does. `body` is the type of what is posted."""

    summary: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    empty: bool = False
    """It answers with its status alone."""
    plain: bool = False
    """It answers with a line of text."""


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation("Answer a conversation", ChatBody, streams=True),
    ("post", "/v1/completions"): Operation("Continue prompts", CompletionBody, streams=True),
    ("post", "/v1/responses"): Operation("Answer a conversation, as items", ResponsesBody, streams=True),
    ("get", "/v1/models"): Operation("The model that is served, and its adapters"),
    ("get", "/v1/models/{id}"): Operation("One model, or one adapter"),
    ("post", "/v1/load_lora_adapter"): Operation("Load an adapter under a name", LoadAdapterBody, plain=True),
    ("post", "/v1/unload_lora_adapter"): Operation("Take an adapter's name away", UnloadAdapterBody, plain=True),
    ("post", "/v1/embeddings"): Operation("Refused: only text is generated"),
    ("post", "/tokenize"): Operation("Token ids of a prompt or a conversation", TokenizeBody),
    ("post", "/detokenize"): Operation("Text of token ids", DetokenizeBody),
    ("get", "/tokenizer_info"): Operation("The model's tokenizer_config.json, with its chat template"),
    ("post", "/reset_prefix_cache"): Operation("Empty the prefix cache, of all tenants"),
    ("get", "/health"): Operation("Whether a step can run now"),
    ("get", "/ready"): Operation("The same"),
    ("get", "/live"): Operation("Whether this process lives", empty=True),
    ("get", "/ping"): Operation("Whether this process lives", empty=True),
    ("post", "/ping"): Operation("Whether this process lives", empty=True),
    ("get", "/load"): Operation("How many answers are being given"),
    ("get", "/version"): Operation("The version"),
    ("get", "/server_info"): Operation("How the server is set up"),
    ("get", "/model_info"): Operation("What the model is"),
    ("get", "/openapi.json"): Operation("This document"),
}


def document(version: str) -> dict[str, Any]:
    """The whole document."""
    bodies = {operation.body for operation in OPERATIONS.values() if operation.body is not None}
    schemas, components = msgspec.json.schema_components(
        sorted(bodies, key=lambda body: body.__name__), ref_template=_REFERENCE
    )
    by_type = dict(zip(sorted(bodies, key=lambda body: body.__name__), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        described: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation)}
        if operation.body is not None:
            content = {"application/json": {"schema": by_type[operation.body]}}
            described["requestBody"] = {"required": True, "content": content}
        if "{id}" in path:
            described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if path in PUBLIC:
            described["security"] = []
        paths.setdefault(path, {})[method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version},
        "paths": paths,
        "security": [{"key": []}, {}],
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain" if operation.plain else "application/json": {"schema": {}}}
    if operation.streams:
        content["text/event-stream"] = {}
    told: dict[str, Any] = {"description": "The answer"} | ({} if operation.empty else {"content": content})
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}}
    return {
        str(HTTPStatus.OK.value): told,
        "default": {"description": "What is wrong", "content": error},
    }
