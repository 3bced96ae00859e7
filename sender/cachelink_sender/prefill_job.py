"""One prefill that any number of handoffs and answers can follow block by block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from cachelink_core.engine.base import Engine
from cachelink_core.errors import CacheLinkError, HandoffAborted, InternalError
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.logs import logger
from cachelink_core.node.measured import BlockClock
from cachelink_core.rpc.types import PrefixOrigin

_log = logger(__name__)

_POLL_S = 1.0
"""How often a waiting follower looks whether its own caller is still there."""


class PrefillJob:
    """Fills a cache in a thread of its own and tells its followers of each block.

    Blocks that the cache held before count as ready at once. When the last follower leaves before
    the end, the prefill stops at the next block.
    """

    def __init__(
        self, engine: Engine, cache: PrefixCache, ids: Sequence[int], block_tokens: int
    ) -> None:
        """Prepares the job; ``start`` begins it.

        Args:
            engine: of the sender's model.
            cache: with room for ``ids``; it may hold the first of them already.
            ids: the whole prefix.
            block_tokens: tokens of a block.
        """
        self.cache = cache
        self.ids = tuple(ids)
        self.block_tokens = block_tokens
        self.block_count = -(-len(self.ids) // block_tokens)
        # An answer may be writing behind the prefix of a held cache just now.
        self.fresh_tokens = max(0, len(self.ids) - cache.length)
        self.started_s = time.monotonic()
        self.clock = BlockClock(cache.length, len(self.ids), block_tokens)
        self._engine = engine
        self._changed = threading.Condition()
        self._ready_s = [self.started_s] * (
            self.block_count if not self.fresh_tokens else cache.length // block_tokens
        )
        self._followers = 0
        self._abandoning = False
        self._done = not self.fresh_tokens
        self._closed = self._done
        self._error: CacheLinkError | None = None
        self.origin: PrefixOrigin = "prefilled" if self.fresh_tokens else "held"
        self.restore_s = 0.0

    @property
    def prefill_s(self) -> float:
        """Seconds from the first to the last block; 0 for a cache that was there already."""
        if not self.fresh_tokens or not self._ready_s:
            return 0.0
        return self._ready_s[-1] - self.started_s

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done

    @property
    def error(self) -> CacheLinkError | None:
        """Why it ended early."""
        return self._error

    @property
    def ready_tokens(self) -> int:
        """Tokens prefilled so far."""
        return min(len(self.ids), len(self._ready_s) * self.block_tokens)

    def start(
        self,
        on_end: Callable[[], None],
        *,
        restore: Callable[[], bool] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Begins the prefill, in a thread of its own.

        Args:
            on_end: called once after the last block or a failure, before any follower hears of it.
            restore: tried first: fills the cache from elsewhere, or says that it cannot.
            after: called last, whatever happened; followers have gone on meanwhile.
        """
        threading.Thread(
            target=self._live, args=(on_end, restore, after), name="prefill", daemon=True
        ).start()

    def follow(self) -> bool:
        """Adds a follower; False if the job has ended or is being abandoned."""
        with self._changed:
            if self._done or self._abandoning:
                return False
            self._followers += 1
            return True

    def leave(self) -> None:
        """Removes a follower."""
        with self._changed:
            self._followers -= 1

    def wait_block(self, block: int) -> float | None:
        """Waits a moment for a block.

        Returns:
            When it was ready (monotonic seconds), or None if it is not yet; call again.

        Raises:
            CacheLinkError: why the prefill ended without that block.
        """
        with self._changed:
            if len(self._ready_s) <= block and not self._done:
                self._changed.wait(_POLL_S)
            if len(self._ready_s) > block:
                return self._ready_s[block]
            if self._done:
                raise self._error or InternalError(f"the prefill ended before block {block}")
            return None

    def wait_end(self) -> bool:
        """Waits a moment for the end; call again while it is False.

        Raises:
            CacheLinkError: why the prefill failed.
        """
        with self._changed:
            if not self._done:
                self._changed.wait(_POLL_S)
            if self._done and self._error is not None:
                raise self._error
            return self._done

    def wait_closed(self) -> bool:
        """Waits a moment until all is done, ``after`` too; call again while it is False."""
        with self._changed:
            if not self._closed:
                self._changed.wait(_POLL_S)
            return self._closed

    def _live(
        self,
        on_end: Callable[[], None],
        restore: Callable[[], bool] | None,
        after: Callable[[], None] | None,
    ) -> None:
        try:
            if restore is not None:
                self._restore(restore)
            self._run(on_end)
            if after is not None:
                after()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _restore(self, restore: Callable[[], bool]) -> None:
        try:
            restored = restore()
        except Exception as error:  # noqa: BLE001 - whoever follows would wait for ever
            _log.exception("restore_failed", error=str(error))
            self.cache.truncate(0)
            return
        if not restored:
            return
        now = time.monotonic()
        with self._changed:
            self.origin = "captured"
            self.restore_s = now - self.started_s
            self.fresh_tokens = 0
            self._ready_s = [now] * self.block_count
            self._changed.notify_all()

    def _run(self, on_end: Callable[[], None]) -> None:
        error: CacheLinkError | None = None
        try:
            self._engine.prefill(
                self.cache,
                self.ids,
                self.block_tokens,
                on_block=self._on_block,
                cancelled=self._abandoned,
            )
            self.cache.use_window()
        except CacheLinkError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001 - a thread's error must reach its followers
            _log.exception("prefill_failed", error=str(failed))
            error = InternalError("the prefill failed; see the sender's log")
        self._error = error
        try:
            on_end()
        except CacheLinkError as failed:
            self._error = failed
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _on_block(self, block: int) -> None:
        self.clock(block)
        with self._changed:
            self._ready_s.append(time.monotonic())
            self._changed.notify_all()

    def _abandoned(self) -> bool:
        with self._changed:
            self._abandoning = self._followers == 0
            return self._abandoning


def aborted() -> HandoffAborted:
    """The error of a handoff whose caller has gone."""
    return HandoffAborted("the caller of the handoff has gone")
