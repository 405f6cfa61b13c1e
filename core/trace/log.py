"""The ordinary log: one readable line a message on standard error. Events go elsewhere, see `emit`."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, Literal

import structlog

Level = Literal["debug", "info", "warning", "error"]


def configure_log(actor: str, level: Level) -> None:
    """Set up structlog for this process; every line names the actor."""

    def name_actor(_logger: Any, _method: str, fields: Any) -> Any:
        fields["event"] = f"{actor}: {fields['event']}"
        return fields

    colors = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            name_actor,
            structlog.dev.ConsoleRenderer(
                colors=colors, pad_event_to=0, pad_level=False, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: _Lines(sys.stderr),
        cache_logger_on_first_use=True,
    )


class _Lines(structlog.PrintLogger):
    """A line that cannot be written, on a full disk or to a reader that has gone, ends nothing and nobody."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    debug = info = warning = error = msg


def log() -> Any:
    """The process's logger: `log().info("ready", port=8000)`."""
    return structlog.get_logger()
