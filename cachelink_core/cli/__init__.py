"""``cachelink``, the command-line tool: a client of both daemons, and the demonstration.

It loads neither torch nor transformers; the demonstration leaves them to the processes it starts.
"""

from cachelink_core.cli.app import main

__all__ = ["main"]
