"""What is left of a cache that is gone: its token ids, so that it can be read again by id.

After a handoff failed or expired, and after a cache was evicted, its ids and frame stay for a while
within a bound, so that an answer with ``on_failure: recompute`` still knows what to read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachelink_core import limits
from cachelink_core.manifest import QueryFrame, pack_ids, unpack_ids


@dataclass(frozen=True, slots=True)
class Remembered:
    """A prefix without its cache.

    Attributes:
        names: its cache id and handoff ids.
        token_ids: little-endian u32: 4 bytes a token instead of 36 for a tuple of ints.
        frame: template text around a question.
        until_s: when it is forgotten.
    """

    names: tuple[str, ...]
    token_ids: bytes
    frame: QueryFrame
    until_s: float

    @property
    def ids(self) -> tuple[int, ...]:
        """The prefix's token ids."""
        return unpack_ids(self.token_ids)


class HeaderMemory:
    """Prefixes by (tenant, name), oldest forgotten first. Safe for threads."""

    def __init__(
        self,
        *,
        keep_s: float = limits.HEADER_MEMORY_S,
        max_entries: int = limits.HEADER_MEMORY_ENTRIES,
        max_bytes: int = limits.HEADER_MEMORY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An empty memory.

        Args:
            keep_s: how long a prefix is remembered.
            max_entries: how many are.
            max_bytes: of their token ids together.
            clock: seconds, never going back.
        """
        self._keep_s = keep_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._by_age: dict[int, tuple[str, Remembered]] = {}
        self._by_name: dict[tuple[str, str], int] = {}
        self._serial = 0
        self._bytes = 0

    def remember(
        self, tenant: str, names: Sequence[str], ids: Sequence[int] | bytes, frame: QueryFrame
    ) -> None:
        """Keeps a prefix under each of ``names``; what was there under them is replaced.

        Args:
            tenant: the owner.
            names: cache id and handoff ids; empty ones are left out.
            ids: token ids, or their little-endian u32 bytes.
            frame: template text around a question.
        """
        packed = ids if isinstance(ids, bytes) else pack_ids(ids)
        kept = tuple(name for name in names if name)
        with self._lock:
            now = self._clock()
            self._forget_replaced(tenant, set(kept))
            self._serial += 1
            record = Remembered(kept, packed, frame, now + self._keep_s)
            self._by_age[self._serial] = tenant, record
            self._bytes += len(packed)
            for name in kept:
                self._by_name[tenant, name] = self._serial
            self._trim(now)

    def recall(self, tenant: str, name: str) -> Remembered | None:
        """What is known of a name; None if it never was, or is forgotten."""
        with self._lock:
            self._trim(self._clock())
            serial = self._by_name.get((tenant, name))
            return None if serial is None else self._by_age[serial][1]

    def __len__(self) -> int:
        with self._lock:
            self._trim(self._clock())
            return len(self._by_age)

    def _trim(self, now: float) -> None:
        while self._by_age:
            _, oldest = next(iter(self._by_age.values()))
            full = len(self._by_age) > self._max_entries or self._bytes > self._max_bytes
            if not full and oldest.until_s > now:
                return
            self._drop(next(iter(self._by_age)))

    def _forget_replaced(self, tenant: str, names: set[str]) -> None:
        """Drops records that nobody could find any more once ``names`` mean something else."""
        for serial in {self._by_name.get((tenant, name)) for name in names}:
            if serial is not None and names.issuperset(self._by_age[serial][1].names):
                self._drop(serial)

    def _drop(self, serial: int) -> None:
        tenant, record = self._by_age.pop(serial)
        self._bytes -= len(record.token_ids)
        for name in record.names:
            if self._by_name.get((tenant, name)) == serial:
                del self._by_name[tenant, name]
