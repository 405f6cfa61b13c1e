"""What is wrong with a request, in the words that its sender reads."""

from __future__ import annotations


class InvalidRequestError(Exception):
    """A request cannot be served as it is. `field` is the part at fault, `code` a short machine-readable reason."""

    def __init__(self, field: str, reason: str, code: str = "invalid_value") -> None:
        super().__init__(reason)
        self.field = field
        self.reason = reason
        self.code = code
