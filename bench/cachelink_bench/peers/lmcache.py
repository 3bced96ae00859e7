"""LMCache's lm:// server: the sender puts 256-token chunks into it, the receiver gets them from it.

The server, the connector and the pool of memory objects are LMCache's own. A PUT has no
acknowledgement; asking for the last key on the same connection tells that all have arrived. Keys are
used again in every run, because the server never forgets one. The copies into and out of its memory
objects count.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.server.__main__ import LMCacheServer
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from cachelink_bench.peers.buffers import (
    TIMEOUT_S,
    BufferReceiver,
    BufferSender,
    WordClient,
    WordServer,
)
from cachelink_bench.peers.place import Place, Sent
from cachelink_core.errors import InternalError

if TYPE_CHECKING:  # it would load torch
    from cachelink_core.codecs.native import Bytes

_CHUNK_TOKENS: Final = 256
_POOL_GB: Final = 0.5
_DTYPE: Final = torch.bfloat16
_PLANES: Final = 2
"""Keys and values."""


class Server:
    """LMCache's server.

    Attributes:
        address: host and port.
    """

    def __init__(self, place: Place) -> None:
        """Serves at once, on a free port."""
        server = LMCacheServer(place.host, 0, "cpu")
        self.address: Any = server.server_socket.getsockname()
        threading.Thread(target=server.run, name="lm", daemon=True).start()

    def close(self) -> None:
        """It ends with the process."""


class _Client:
    """One connection to the server, and the pool that it takes memory objects from."""

    def __init__(self, place: Place) -> None:
        host, port = place.server
        self._width = place.token_bytes // (_PLANES * _DTYPE.itemsize)
        pool = LocalCPUBackend(
            LMCacheEngineConfig.from_defaults(
                chunk_size=_CHUNK_TOKENS, local_cpu=True, max_local_cpu_size=_POOL_GB
            ),
            LMCacheMetadata(
                model_name="cache",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=_DTYPE,
                kv_shape=(1, _PLANES, _CHUNK_TOKENS, 1, self._width),
                chunk_size=_CHUNK_TOKENS,
            ),
            dst_device="cpu",
        )
        self._pool = pool
        self._chunk_bytes = _CHUNK_TOKENS * place.token_bytes
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="lm", daemon=True).start()
        self._server = LMCServerConnector(host, port, self._loop, pool)

    def put(self, data: Bytes) -> bool:
        """Puts every chunk; whether the last one is there."""
        key = None
        for number, chunk in self._chunks(data):
            tokens = chunk.nbytes // (_PLANES * _DTYPE.itemsize * self._width)
            shape = torch.Size((_PLANES, 1, tokens, self._width))
            held: Any = self._pool.allocate(shape, _DTYPE, MemoryFormat.KV_2LTD)
            if held is None:
                raise InternalError(f"no memory object of {chunk.nbytes} bytes is free")
            np.frombuffer(held.byte_array, np.uint8)[:] = chunk
            key = _key(number)
            self._wait(self._server.put(key, held))
            held.ref_count_down()
        there: bool = self._wait(self._server.exists(key))
        return there

    def get(self, into: Bytes) -> None:
        """Gets every chunk."""
        for number, chunk in self._chunks(into):
            held = self._wait(self._server.get(_key(number)))
            if held is None:
                return  # the digest will say that it is missing
            got = np.frombuffer(held.byte_array, np.uint8)
            chunk[: got.nbytes] = got[: chunk.nbytes]
            held.ref_count_down()

    def _chunks(self, data: Bytes) -> Iterator[tuple[int, Bytes]]:
        for number, at in enumerate(range(0, data.nbytes, self._chunk_bytes)):
            yield number, data[at : at + self._chunk_bytes]

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(TIMEOUT_S)


class Receiver(BufferReceiver):
    """The receiving end.

    Attributes:
        address: of the word.
    """

    def __init__(self, place: Place) -> None:
        """Connects to the server."""
        super().__init__(place)
        self._client = _Client(place)
        self._word = WordServer(place.host, self._fetch)
        self.address: Any = self._word.address

    def close(self) -> None:
        """Listens no more; the connection to the server ends with the process."""
        self._word.close()

    def _fetch(self) -> bool:
        self._client.get(self.data)
        return self.verify()


class Sender(BufferSender):
    """The sending end."""

    def __init__(self, place: Place) -> None:
        """Connects to the server."""
        super().__init__(place)
        self._client = _Client(place)
        self._word = WordClient(place.to)

    def send(self) -> Sent:
        """See ``Sending.send``."""
        began_s = time.monotonic()
        there = self._client.put(self.data)
        verified = self._word.ask()
        return Sent(time.monotonic() - began_s, there and verified)

    def close(self) -> None:
        """Closes the word's connection; the other one ends with the process."""
        self._word.close()


def _key(number: int) -> Any:
    return CacheEngineKey("cache", 1, 0, number, _DTYPE)
