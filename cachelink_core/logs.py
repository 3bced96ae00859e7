"""Structured logs: one event a line on standard error, as JSON or for people.

A library must not configure the logging of the program that imports it. So loggers here go through
the standard library's, and only a daemon calls ``install``. What a line is about (which handoff,
which cache, which peer, which tenant) is bound once, where it becomes known, and travels with the
context: ``with bound(handoff_id=…)``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final, Literal, cast

import structlog
from structlog.typing import Processor

from cachelink_core.errors import ConfigError

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

CONTEXT_FIELDS: Final = ("handoff_id", "cache_id", "peer", "tenant")
"""What ``bound`` accepts: few names, the same in every line of both daemons."""

_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of one module: ``log = logs.logger(__name__)``; ``log.info("event", key=value)``."""
    wrapped = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return cast(structlog.stdlib.BoundLogger, wrapped)


@contextmanager
def bound(**fields: str) -> Iterator[None]:
    """Adds fields to every line that this context writes.

    A thread started inside does not inherit them: it binds its own.

    Raises:
        TypeError: a name that is not one of ``CONTEXT_FIELDS``.
    """
    strangers = fields.keys() - set(CONTEXT_FIELDS)
    if strangers:
        raise TypeError(f"{sorted(strangers)} are not among the log fields {CONTEXT_FIELDS}")
    with structlog.contextvars.bound_contextvars(**fields):
        yield


def install(level: LogLevel, fmt: LogFormat, stream: IO[str] | None = None) -> logging.Handler:
    """Sends every log line of this process, other libraries' too, to one stream.

    Args:
        level: the least severe level that is written.
        fmt: ``json`` for machines, ``console`` for people.
        stream: standard error when None; standard output carries only the ready line.

    Returns:
        The handler, which replaces those of an earlier call.

    Raises:
        ConfigError: a level or format that does not exist.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log.level {level!r} is not one of debug, info, warning, error")
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_formatter(fmt, colors=handler.stream.isatty()))
    root = logging.getLogger()
    for earlier in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(number)
    logging.captureWarnings(True)
    return handler


# The variables of a frame are documents, token ids and secrets: no traceback shows them.
_without_locals: Final = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


class _Handler(logging.StreamHandler[IO[str]]):
    """Ours among the root logger's handlers."""


def _formatter(fmt: str, *, colors: bool) -> structlog.stdlib.ProcessorFormatter:
    renderers: dict[str, list[Processor]] = {
        "json": [
            structlog.processors.ExceptionRenderer(_without_locals),
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        "console": [
            structlog.dev.ConsoleRenderer(
                colors=colors, exception_formatter=structlog.dev.plain_traceback
            )
        ],
    }
    if fmt not in renderers:
        raise ConfigError(f"log.format {fmt!r} is not one of {', '.join(renderers)}")
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=list(_SHARED),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers[fmt]],
    )
