"""The two places at which a serial node differs from a shipped one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cachelink_core.engine.base import Engine
from cachelink_core.handoff import events
from cachelink_core.manifest import Seal
from cachelink_receiver.incoming import ChunkSink, Incoming
from cachelink_sender.pump import Frame, Pump


class SerialPump(Pump):
    """Encodes every chunk into memory before the first one is sent."""

    sends_in_place = False

    def _paced(self, made: Iterator[Frame]) -> Iterator[Frame]:
        return iter(list(made))


class SerialSink(ChunkSink):
    """Keeps every chunk as it came until the commit; then verifies and decodes them in turn."""

    def __init__(self, engine: Engine, incoming: Incoming) -> None:
        super().__init__(engine, incoming)
        self._kept: list[events.Chunk] = []

    def take(self, chunk: events.Chunk) -> None:
        """Keeps one chunk; it counts as progress, so that the lease does not run out.

        Raises:
            CacheLinkError: the handoff has ended.
        """
        with self._incoming.lock:
            self._check_alive()
            self._incoming.session.touch(time.monotonic())
        # A copy: a plane may receive the next chunk into the same memory.
        self._kept.append(replace(chunk, payload=memoryview(bytes(chunk.payload))))

    def place(self, _block: int, _run: int, _wire_bytes: int, /) -> Sequence[memoryview]:
        """Nowhere: loading is a stage of its own."""
        return ()

    def commit(self, seal: Seal) -> None:
        """Verifies and decodes everything, then holds the seal against it.

        Raises:
            CacheLinkError: see ``ChunkSink.take`` and ``ChunkSink.commit``.
        """
        for chunk in self._kept:
            super().take(chunk)
        self._kept.clear()
        super().commit(seal)
