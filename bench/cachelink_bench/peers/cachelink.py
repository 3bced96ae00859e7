"""CacheLink: the sender's pump, the receiver's node, in one pair of processes for all of its rows.

The receiver's word is the receipt, which it gives when every digest fits and the cache is published.
A row with digests off is for this benchmark alone: no option of a daemon does that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from cachelink_bench.capture import HEADROOM_TOKENS
from cachelink_bench.handoff_ends import HandoffClient, HandoffServer, Subject
from cachelink_bench.peers.payload import widened
from cachelink_bench.peers.place import Place, Prepared, Sent
from cachelink_core.engine.loading import load_engine, set_threads
from cachelink_core.engine.spill import load_cache
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import DataLoss
from cachelink_core.handoff import session
from cachelink_core.rpc.transfer_types import Scheme

_DIGEST: Final = session.chunk_digest
_NO_DIGEST: Final = bytes(16)


class Receiver:
    """The receiving end.

    Attributes:
        address: of its gRPC server.
    """

    def __init__(self, place: Place) -> None:
        """Loads the model and serves."""
        self._server = HandoffServer(_engine(place), place.host)
        self.address: Any = self._server.address

    def expect(self, prepared: Prepared, options: dict[str, str]) -> None:
        """See ``Receiving.expect``. The destination was made when the sender reserved it."""
        del prepared
        _switch_digests(options)

    def found(self, name: str) -> str:
        """See ``Receiving.found``. The cache is then evicted."""
        return self._server.take_digest(name)

    def close(self) -> None:
        """Ends the server."""
        self._server.close()


class Sender:
    """The sending end."""

    def __init__(self, place: Place) -> None:
        """Loads the model."""
        self._place = place
        self._engine = _engine(place)
        self._clients: dict[tuple[str, Scheme], HandoffClient] = {}
        self._now: HandoffClient | None = None

    def load(self, stem: Path) -> None:
        """See ``Sending.load``."""
        self.close()
        held = load_cache(stem.with_suffix(".safetensors"), headroom=HEADROOM_TOKENS)
        self._subject = Subject(self._engine, held, self._place.block_tokens)

    def prepare(self, run: int, options: dict[str, str]) -> Prepared:
        """See ``Sending.prepare``. Reserves, for which the receiver allocates and touches pages."""
        del run  # the receiver holds nothing of an earlier run
        _switch_digests(options)
        codec, plane = options["codec"], msgspec.convert(options["plane"], Scheme)
        if (codec, plane) not in self._clients:
            client = HandoffClient(self._subject, self._place.to, codec, plane)
            self._clients[codec, plane] = client
        self._now = self._clients[codec, plane]
        self._now.reserve()
        return Prepared(self._now.expected, self._now.wire_bytes)

    def send(self) -> Sent:
        """See ``Sending.send``."""
        assert self._now is not None, "prepared"
        try:
            times = self._now.push()
        except DataLoss:
            return Sent(0.0, verified=False, name=self._now.cache_id)
        return Sent(times.ended_s - times.called_s, verified=True, name=self._now.cache_id)

    def close(self) -> None:
        """Closes the channels."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


def _engine(place: Place) -> TransformersEngine:
    set_threads(1)
    return widened(load_engine(place.model, device="cpu"), place.window)


def _switch_digests(options: dict[str, str]) -> None:
    """Makes the session's digest of a chunk the real one, or a constant that costs nothing."""
    off = options.get("digests") == "off"
    vars(session)["chunk_digest"] = _no_digest if off else _DIGEST


def _no_digest(block: int, run: int, *parts: memoryview | bytes) -> bytes:
    del block, run, parts
    return _NO_DIGEST
