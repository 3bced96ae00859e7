"""One push of a handoff, and how far it is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from cachelink_core import limits
from cachelink_core.errors import CacheLinkError, InternalError
from cachelink_core.logs import logger
from cachelink_core.manifest import Header
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.planes import Plane
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.transfer_types import PushReceipt
from cachelink_core.rpc.types import Progress
from cachelink_sender.prefill_job import PrefillJob
from cachelink_sender.pump import Pump

_log = logger(__name__)
_PROGRESS_S = 0.2
"""Seconds between two progress events."""


class Push:
    """A push in a thread of its own, so that the caller hears of its progress meanwhile.

    Attributes:
        pump: makes the frames.
        receipt: set when it has ended well.
        ended_s: when it ended, monotonic.
    """

    def __init__(
        self, client: TransferClient, plane: Plane, pump: Pump, deadline_s: float, call: Call
    ) -> None:
        """Prepares it; ``progress`` starts it."""
        self.pump = pump
        self.receipt: PushReceipt | None = None
        self.ended_s = 0.0
        self._client = client
        self._plane = plane
        self._deadline_s = deadline_s
        self._call = call
        self._given_up = threading.Event()
        self._result: queue.Queue[PushReceipt | CacheLinkError] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)

    def progress(self, header: Header, job: PrefillJob) -> Iterator[Progress]:
        """Starts, and yields now and then until the end; then ``receipt`` is set.

        Raises:
            CacheLinkError: why it failed.
        """
        self._thread.start()
        while True:
            try:
                result = self._result.get(timeout=_PROGRESS_S)
            except queue.Empty:
                yield self._now(header, job)
                continue
            if isinstance(result, CacheLinkError):
                raise result
            self.receipt = result
            yield self._now(header, job)
            return

    def close(self, handoff_id: str) -> None:
        """Ends a push that is still under way and frees its reservation at the receiver."""
        if self.receipt is not None:
            return
        self._given_up.set()
        try:
            self._client.abort(
                handoff_id, "the sender gave up", deadline_s=limits.CONNECT_DEADLINE_S
            )
        except CacheLinkError as error:
            _log.info("abort_failed", handoff_id=handoff_id, error=str(error))
        if self._thread.ident is not None:
            self._thread.join(limits.CONTROL_DEADLINE_S)

    def _now(self, header: Header, job: PrefillJob) -> Progress:
        times = self.pump.times
        return Progress(
            header.handoff_id,
            header.tokens,
            job.ready_tokens,
            header.layout.encoded_bytes,
            times.sent_raw_bytes,
            times.sent_wire_bytes,
        )

    def _run(self) -> None:
        try:
            receipt: PushReceipt | CacheLinkError = self._plane.push(
                self.pump.frames(), deadline_s=self._deadline_s, cancelled=self._cancelled
            )
        except CacheLinkError as error:
            receipt = error
        except Exception:  # noqa: BLE001 - a thread's error must reach its caller
            _log.exception("push_failed")
            receipt = InternalError("the push failed; see the sender's log")
        finally:
            # A failed stream's generator is not closed but collected, some day; its encoder thread
            # would hold the cache until then.
            self.pump.stop()
        self.ended_s = time.monotonic()
        self._result.put(receipt)

    def _cancelled(self) -> bool:
        return self._given_up.is_set() or self._call.cancelled()
