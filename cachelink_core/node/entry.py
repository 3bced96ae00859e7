"""The way into a daemon's process: resolve the configuration, live one life, say why not."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from cachelink_core import logs
from cachelink_core.config import DaemonConfig, load_config
from cachelink_core.errors import CacheLinkError, ConfigError
from cachelink_core.node.allocator import limit_arenas
from cachelink_core.node.daemon import NodeDaemon

EXIT_CONFIG = 2
EXIT_FAILED = 1

_STDERR = 2
"""The descriptor: whoever runs a daemon in-process may have put something else in ``sys.stderr``."""

C = TypeVar("C", bound=DaemonConfig)


def run_daemon(
    config_class: type[C],
    build: Callable[[C], NodeDaemon[C]],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a daemon with this process's environment; returns the exit status.

    0 after a drain, 1 when work was cut or the start failed, 2 for a wrong configuration. SIGABRT ends
    the process at once and writes what every thread was doing to standard error.

    Args:
        config_class: its options, and its name for messages.
        build: from the resolved configuration to a daemon that is not started yet.
        argv: its options; None for this process's.
    """
    faulthandler.enable(_STDERR)
    limit_arenas()
    try:
        config = load_config(config_class, sys.argv[1:] if argv is None else argv, os.environ)
        logs.install(config.log.level, config.log.format)
        return build(config).run()
    except CacheLinkError as error:
        sys.stderr.write(f"{config_class.program}: {error}\n")
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
