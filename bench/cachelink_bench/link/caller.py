"""A client of both daemons in the sender's namespace, as a process that takes one order a line.

Orders come as JSON on standard input and replies go out on standard output. It loads no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from cachelink_bench.link.cpu_watch import CpuWatch
from cachelink_bench.order_process import killed_after
from cachelink_core.errors import CacheLinkError, InternalError
from cachelink_core.rpc.client import (
    HeldCache,
    Receipt,
    ReceiverClient,
    Sampling,
    SenderClient,
    TokenIds,
)

CALL_S: Final = 900.0
"""For one order: a prefill of a whole window on a busy machine."""

_SAME: Final = Sampling(max_new_tokens=4, ignore_eos=True)
_QUERY: Final = TokenIds((1, 2, 3))


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Order: the sender shall hold the cache of ``ids``."""

    sender: str
    ids: tuple[int, ...]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Order: a held cache goes to the receiver, which forgets it again.

    Attributes:
        sender: its address.
        receiver: its address.
        receiver_name: in the sender's list.
        cache_id: at the sender.
        pids: of both daemons.
        compare: ask both ends the same afterwards; the answers must be equal.
    """

    sender: str
    receiver: str
    receiver_name: str
    cache_id: str
    pids: tuple[int, int]
    compare: bool = False


class Held(msgspec.Struct, frozen=True, tag=True):
    """Reply: the cache's name at the sender."""

    cache_id: str


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Reply: one handoff.

    Attributes:
        seconds: first payload frame handed over to receipt of the installation, sender's clock.
        payload_bytes: that went over the link.
        allocate_s: allocation and pre-faulting of the destination, before the clock started.
        reserve_s: Reserve, sender's clock, the allocation included.
        tail_s: last frame received to installed, receiver's clock.
        sender_cpu_s: of the sender's process in ``seconds``.
        receiver_cpu_s: likewise; the allocation came before.
        plane: that carried the chunks.
    """

    seconds: float
    payload_bytes: int
    allocate_s: float
    reserve_s: float
    tail_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    plane: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reply: an error of the project, by its reason."""

    reason: str
    message: str


Order = Hold | Move
Reply = Held | Moved | Refused
_Kind = TypeVar("_Kind", Held, Moved)


class Caller:
    """The process, as its parent sees it; a context manager that ends it."""

    def __init__(self, within: Sequence[str]) -> None:
        """Starts it.

        Args:
            within: words before its command, those that enter the namespace.
        """
        # gRPC would write to the terminal that a daemon which ends has said goodbye.
        quiet = {"GRPC_VERBOSITY": "ERROR", **os.environ}
        self._process = subprocess.Popen(
            [*within, sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=quiet,
            process_group=0,  # Ctrl-C is for the parent, which ends it
        )

    def hold(self, order: Hold) -> str:
        """Has a sender hold a cache; returns its name there.

        Raises:
            CacheLinkError: as the daemon raised it.
        """
        return self._ask(order, Held).cache_id

    def move(self, order: Move) -> Moved:
        """Has a cache handed over once.

        Raises:
            CacheLinkError: as a daemon raised it.
            InternalError: both ends answered differently.
        """
        return self._ask(order, Moved)

    def _ask(self, order: Order, kind: type[_Kind]) -> _Kind:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        try:
            with killed_after(self._process, CALL_S):
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise InternalError("the calling process ended without a reply")
        reply = msgspec.json.decode(line, type=Reply)
        if isinstance(reply, Refused):
            raise InternalError(f"{reply.reason}: {reply.message}")
        assert isinstance(reply, kind), "every order has its reply"
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        if error is not None:
            self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _hold(order: Hold) -> Held:
    with SenderClient(order.sender) as sender:
        receipt = sender.prefill(TokenIds(order.ids), deadline_s=CALL_S)
    return Held(receipt.sender_cache_id)


def _move(order: Move) -> Moved:
    with SenderClient(order.sender) as sender, ReceiverClient(order.receiver) as receiver:
        with CpuWatch(order.pids) as watch:
            receipt = sender.handoff(
                HeldCache(order.cache_id), order.receiver_name, codec="native", deadline_s=CALL_S
            )
            ended_s = time.monotonic()
        try:
            _check_moved(receipt)
            if order.compare:
                _check_same(sender, receiver, order.cache_id, receipt.cache_id)
        finally:
            receiver.evict(receipt.cache_id)
    phases = receipt.phases
    seconds = phases["send"] + phases["tail"]
    sender_cpu_s, receiver_cpu_s = watch.since(ended_s - seconds)
    return Moved(
        seconds=seconds,
        payload_bytes=receipt.wire_bytes,
        allocate_s=phases["allocate"],
        reserve_s=phases["reserve"],
        tail_s=phases["tail"],
        sender_cpu_s=sender_cpu_s,
        receiver_cpu_s=receiver_cpu_s,
        plane=receipt.data_plane,
    )


def _check_moved(receipt: Receipt) -> None:
    if receipt.already_installed or receipt.wire_bytes != receipt.native_bytes:
        raise InternalError(
            f"{receipt.wire_bytes} of {receipt.native_bytes} bytes were moved, "
            f"already_installed is {receipt.already_installed}"
        )


def _check_same(sender: SenderClient, receiver: ReceiverClient, ours: str, theirs: str) -> None:
    """Greedy tokens from the moved cache must be those from the cache that was moved."""
    said = [
        [
            token
            for delta in node.answer(HeldCache(name), _QUERY, sampling=_SAME, deadline_s=CALL_S)
            for token in delta.token_ids
        ]
        for node, name in ((sender, ours), (receiver, theirs))
    ]
    if said[0] != said[1]:
        raise InternalError(f"answers differ: {said[0]} at the sender, {said[1]} at the receiver")


def main() -> int:
    """Takes orders until standard input ends."""
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        try:
            reply: Reply = _hold(order) if isinstance(order, Hold) else _move(order)
        except CacheLinkError as error:
            reply = Refused(error.reason, str(error))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
