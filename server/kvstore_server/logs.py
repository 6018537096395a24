"""How log lines look: one event each, as text for people or JSON for machines, on standard error."""

import logging
import sys

import structlog

from kvstore_server.config import Settings


def configure_logs(settings: Settings) -> None:
    """Lines from `log_level` up go to standard error, in `log_format`. For the whole process."""
    as_json = settings.log_format == "json"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *([structlog.processors.format_exc_info] if as_json else []),
            structlog.processors.JSONRenderer()
            if as_json
            else structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
