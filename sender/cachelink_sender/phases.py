"""Where the time of a handoff went, by name.

On the sender's clock one phase follows another, and nothing is left over::

    start + prefill_wait + reserve + send + tail = total

*start* is what the sender does by itself before the first chunk is on its way: token ids, header,
plan of chunks, threads, the stream's opening, and encoding that first chunk. *prefill_wait* is how
long it waits for its model meanwhile: for all of the prefix, or, where blocks are sent as they are
prefilled, for the first one; later waits are part of *send*. *tail* is the one duration of the
receiver's clock in the sum: last frame received to Installed. It has parts of its own::

    load + install = check + tail

where *load* begins with *check*, the manifest's, made at Reserve. All else overlaps: *prefill*,
*encode*, *load_busy*, *transform* and *device_wait* are sums of work, *allocate* is part of
*reserve*, *push* is the stream with its tail.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachelink_core.rpc.transfer_types import PushReceipt, Reservation
from cachelink_core.rpc.types import Phases
from cachelink_sender.pump import PumpTimes


@dataclass
class HandoffClock:
    """Marks and durations of a handoff on the sender's monotonic clock.

    Attributes:
        began_s: when the request came.
        start_s: of *start*, as far as it came before Reserve.
        waited_s: for a whole prefill, before Reserve.
        reserve_s: of Reserve.
        reserved_s: when it was answered.
    """

    began_s: float
    start_s: float = 0.0
    waited_s: float = 0.0
    reserve_s: float = 0.0
    reserved_s: float = 0.0

    def reserving(self, now_s: float) -> None:
        """Notes that Reserve is about to be called."""
        self.start_s = now_s - self.began_s - self.waited_s
        self.reserved_s = now_s

    def reserved(self, now_s: float) -> None:
        """Notes its answer."""
        self.reserve_s = now_s - self.reserved_s
        self.reserved_s = now_s

    def phases(self) -> Phases:
        """Of a handoff that needed no more than Reserve."""
        return {
            "start": self.start_s,
            "prefill_wait": self.waited_s,
            "reserve": self.reserve_s,
            "total": self.reserved_s - self.began_s,
        }


def handoff_phases(
    clock: HandoffClock,
    times: PumpTimes,
    reservation: Reservation,
    pushed: PushReceipt,
    *,
    prefill_s: float,
    ended_s: float,
) -> Phases:
    """Phases of an installed handoff, see the module.

    Args:
        clock: up to Reserve.
        times: of the pump.
        reservation: the receiver's reply.
        pushed: its receipt.
        prefill_s: of the model, first to last block.
        ended_s: when the receipt came, monotonic.
    """
    # A handoff whose blocks were all held has no first frame.
    first_s = times.first_frame_at_s or ended_s - pushed.tail_s
    return {
        "prefill": prefill_s,
        "start": clock.start_s + first_s - clock.reserved_s - times.lead_wait_s,
        "prefill_wait": clock.waited_s + times.lead_wait_s,
        "reserve": clock.reserve_s,
        "allocate": reservation.allocate_s,
        "check": reservation.check_s,
        "encode": times.encode_s,
        "send": max(0.0, ended_s - first_s - pushed.tail_s),
        "load": pushed.load_s,
        "load_busy": pushed.load_busy_s,
        "install": pushed.install_s,
        "transform": pushed.transform_s,
        "device_wait": pushed.device_wait_s,
        "tail": pushed.tail_s,
        "push": ended_s - times.reserved_at_s,
        "total": ended_s - clock.began_s,
    }
