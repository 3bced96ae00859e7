"""The receiving process of the loopback benchmark: every arm's receiving end, and its clocks.

It obeys orders (``order_process.py``). All arms share the process, so that they share interpreter,
allocator and memory; the ones that are not measured wait in the kernel.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from cachelink_bench.bare_grpc import BareServer
from cachelink_bench.framed_socket import SocketServer
from cachelink_bench.handoff_ends import HandoffServer
from cachelink_bench.order_process import die_with_parent, reply, serve_orders, take_stdout
from cachelink_core import logs
from cachelink_core.codecs.native import Bytes
from cachelink_core.engine.loading import load_engine, set_threads


def cpu_s() -> float:
    """User and system seconds of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class BufferEnd:
    """A baseline's destination: cleared and touched before each run, digested after it."""

    def __init__(self, data: Bytes) -> None:
        """Binds the buffer that the baseline's server writes into."""
        self._data = data

    def clear(self) -> None:
        """Overwrites every byte, which also maps every page."""
        self._data.fill(0xFF)

    def digest(self) -> str:
        """XXH3-128 of what is there now."""
        return xxh3_128(self._data.data).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(prog="loopback_receiver", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bytes", type=int, required=True, help="of a baseline's destination")
    parser.add_argument("--cache-dir", type=Path)
    options = parser.parse_args(argv)
    logs.install("error", "console")
    set_threads(1)
    replies = take_stdout()
    die_with_parent()
    with ExitStack() as stack:
        end = HandoffServer(load_engine(options.model, cache_dir=options.cache_dir))
        stack.callback(end.close)
        bare = BareServer(np.empty(options.bytes, np.uint8))
        stack.callback(bare.close)
        sockets = SocketServer(np.empty(options.bytes, np.uint8))
        stack.callback(sockets.close)
        buffers = {"bare": BufferEnd(bare.data), "socket": BufferEnd(sockets.data)}
        reply(replies, cachelink=end.address, bare=bare.address, socket=list(sockets.address))
        # A collection before each run then looks at what the runs left, not at all of torch.
        gc.freeze()
        serve_orders(replies, lambda order: _obey(order, end, buffers))
    return 0


def _obey(order: dict[str, str], end: HandoffServer, buffers: dict[str, BufferEnd]) -> Any:
    match order:
        case {"do": "clear", "buffer": name}:
            buffers[name].clear()
            return {}
        case {"do": "cpu"}:
            return {"cpu_s": cpu_s()}
        case {"do": "collect"}:
            gc.collect()
            return {}
        case {"do": "digest", "buffer": name}:
            return {"digest": buffers[name].digest()}
        case {"do": "digest", "cache_id": cache_id}:
            return {"digest": end.take_digest(cache_id)}
    raise ValueError(f"unknown order {order}")


if __name__ == "__main__":
    raise SystemExit(main())
