"""The receiving process of the loopback benchmark: every arm's receiving end, and its clocks.

It is told what to do by one JSON document a line on standard input, answers likewise on standard
output, and ends when its input does. All arms share the process, so that they share interpreter,
allocator and memory; the ones that are not measured wait in the kernel.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from cachelink_bench.bare_grpc import BareServer
from cachelink_bench.capture import cache_digest
from cachelink_bench.framed_socket import SocketServer
from cachelink_core import logs
from cachelink_core.codecs.native import Bytes
from cachelink_core.engine.base import Engine
from cachelink_core.engine.loading import load_engine, set_threads
from cachelink_core.metrics import Metrics
from cachelink_core.node.parts import build_parts
from cachelink_core.rpc.server import Listen, build_server
from cachelink_receiver.config import ReceiverConfig
from cachelink_receiver.node import ReceiverNode

TENANT = "default"


def cpu_s() -> float:
    """User and system seconds of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class CacheLinkEnd:
    """A receiver's node behind its gRPC server, as the daemon builds them.

    Attributes:
        address: ``host:port``.
    """

    def __init__(self, engine: Engine) -> None:
        """Serves at once."""
        self._node = ReceiverNode(build_parts(ReceiverConfig(), engine, Metrics("receiver")))
        parts = self._node.parts
        self._server = build_server(
            Listen(), transfers=parts.transfers, answers=parts.answers, receiver=self._node
        )
        self.address = self._server.address
        self._node.start()
        self._server.start()
        self._server.set_serving(serving=True)

    def take_digest(self, cache_id: str) -> str:
        """Digest of an installed cache, which is then evicted."""
        store = self._node.parts.store
        with store.pin(TENANT, cache_id) as held:
            found = cache_digest(held.cache, len(held.ids))
        store.evict(TENANT, cache_id)
        return found

    def close(self) -> None:
        """Ends it."""
        self._server.stop(0)
        self._node.close()


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
    replies, sys.stdout = sys.stdout, sys.stderr
    with ExitStack() as stack:
        end = CacheLinkEnd(load_engine(options.model, cache_dir=options.cache_dir))
        stack.callback(end.close)
        bare = BareServer(np.empty(options.bytes, np.uint8))
        stack.callback(bare.close)
        sockets = SocketServer(np.empty(options.bytes, np.uint8))
        stack.callback(sockets.close)
        buffers = {"bare": BufferEnd(bare.data), "socket": BufferEnd(sockets.data)}
        _reply(replies, cachelink=end.address, bare=bare.address, socket=list(sockets.address))
        # A collection before each run then looks at what the runs left, not at all of torch.
        gc.freeze()
        for line in sys.stdin:
            _reply(replies, **_obey(json.loads(line), end, buffers))
    return 0


def _obey(order: dict[str, str], end: CacheLinkEnd, buffers: dict[str, BufferEnd]) -> Any:
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


def _reply(stream: Any, **fields: object) -> None:
    stream.write(json.dumps(fields) + "\n")
    stream.flush()


if __name__ == "__main__":
    raise SystemExit(main())
