"""``cachelink-sender``: resolves the configuration and lives one life."""

from __future__ import annotations

import os
import sys

from cachelink_core import logs
from cachelink_core.config import load_config
from cachelink_core.errors import CacheLinkError, ConfigError
from cachelink_sender.config import SenderConfig
from cachelink_sender.daemon import sender_daemon

EXIT_CONFIG = 2
EXIT_FAILED = 1


def main() -> int:
    """Runs the daemon; returns the exit status.

    0 after a drain, 1 when work was cut or the start failed, 2 for a wrong configuration.
    """
    try:
        config = load_config(SenderConfig, sys.argv[1:], os.environ)
        logs.install(config.log.level, config.log.format)
        return sender_daemon(config).run()
    except ConfigError as error:
        sys.stderr.write(f"cachelink-sender: {error}\n")
        return EXIT_CONFIG
    except CacheLinkError as error:
        sys.stderr.write(f"cachelink-sender: {error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
