"""The first baseline: the same bytes through gRPC and nothing else.

One client stream of 1 MiB messages as raw bytes, with the channel options of the data plane; the
receiver copies each into its place. No protobuf, no digest, no manifest, no lock: what is slower
than this is CacheLink's own cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np

from cachelink_core.limits import MIB
from cachelink_core.rpc.channel import open_channel, server_options

if TYPE_CHECKING:  # it would load torch
    from cachelink_core.codecs.native import Bytes

_SERVICE: Final = "bench.Bare"
_METHOD: Final = f"/{_SERVICE}/Put"
_DEADLINE_S: Final = 60.0


class BareServer:
    """The receiving end.

    Attributes:
        address: ``host:port``.
        data: the destination.
    """

    def __init__(self, data: Bytes, host: str = "127.0.0.1") -> None:
        """Serves at once, on a free port."""
        self.data = data
        self._server = grpc.server(
            ThreadPoolExecutor(2, thread_name_prefix="bare"), options=server_options()
        )
        handler: Any = grpc.stream_unary_rpc_method_handler(self._put)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Put": handler}),)
        )
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._server.start()

    def close(self) -> None:
        """Ends it."""
        self._server.stop(0).wait(5)

    def _put(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        del context
        at = 0
        for message in messages:
            self.data[at : at + len(message)] = np.frombuffer(message, np.uint8)
            at += len(message)
        return at.to_bytes(8, "little")


class BareClient:
    """The sending end."""

    def __init__(self, address: str) -> None:
        """Opens the channel; it connects on the first call."""
        self._channel = open_channel(address, data=True)
        self._put: Any = self._channel.stream_unary(_METHOD)

    def send(self, data: Bytes) -> float:
        """Sends ``data``; returns seconds from its first byte to the acknowledgement."""
        view = data.data
        began: list[float] = []

        def messages() -> Iterator[bytes]:
            began.append(time.monotonic())
            for at in range(0, len(view), MIB):
                yield bytes(view[at : at + MIB])

        reply = self._put(messages(), timeout=_DEADLINE_S)
        ended = time.monotonic()
        assert int.from_bytes(reply, "little") == len(view), "the server took every byte"
        return ended - began[0]

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()
