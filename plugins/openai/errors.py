"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, all four keys always there."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from octavo.core.client.stream import ClientError, RequestRefused, ServiceUnavailable
from octavo.plugins.openai.tenants.account import Limited

RETRY_AFTER_S = "1"


class ApiError(Exception):
    """What a client is told instead of an answer. `param` names the field that was wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self._headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self._type(), "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        busy = self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
        return {**({"retry-after": RETRY_AFTER_S} if busy else {}), **self._headers}

    def _type(self) -> str:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: the request cannot be served as it stands."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


_REFUSED_STATUS = {
    "model_not_found": HTTPStatus.NOT_FOUND,
    "overloaded": HTTPStatus.TOO_MANY_REQUESTS,
    "draining": HTTPStatus.SERVICE_UNAVAILABLE,
    "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "internal": HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Refusals that are not a 400."""


def from_client(error: ClientError, param: str | None = None) -> ApiError:
    """How the engine's refusal is told over HTTP; `param` overrides the field that it names."""
    match error:
        case RequestRefused():
            status = _REFUSED_STATUS.get(error.code, HTTPStatus.BAD_REQUEST)
            message = error.reason if param is None else f"{param}: {error.reason}"
            return ApiError(status, message, param=param or error.field or None, code=error.code)
        case ServiceUnavailable():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, error.reason, code="service_unavailable")
        case _:
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), code="internal")


def limited(error: Limited) -> ApiError:
    """429: what was asked for is more than its key may have now; `param` names the limit."""
    headers = {"retry-after": str(error.retry_after_s)}
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS, str(error), param=error.limit, code="rate_limit_exceeded", headers=headers
    )


def unauthorized(message: str, code: str) -> ApiError:
    """401: there is no key, or none that is good any more."""
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code=code, headers={"www-authenticate": "Bearer"})


def failed(finish: str, reason: str) -> ApiError:
    """A choice ended as `error` or `cancelled` through no doing of its client."""
    if finish == "cancelled":
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE, reason or "the request was cancelled by the server", code="cancelled"
        )
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR, reason or "the request failed in the engine", code="generation_failed"
    )
