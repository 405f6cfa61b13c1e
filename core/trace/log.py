"""The ordinary log: one readable line a message on standard error. Events go elsewhere, see `emit`."""

from __future__ import annotations

import logging
import sys
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def log() -> Any:
    """The process's logger: `log().info("ready", port=8000)`."""
    return structlog.get_logger()
