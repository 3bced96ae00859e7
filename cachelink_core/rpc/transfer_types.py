"""Replies of the data plane, as plain frozen values: no protobuf, no torch.

Names ending in ``_s`` are seconds of the receiver's clock, ``_bytes`` are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from cachelink_core.codec_spec import Trust
from cachelink_core.errors import CacheLinkError

Scheme = Literal["grpc", "tcp"]
"""How chunks travel."""

SCHEMES: Final[tuple[Scheme, ...]] = get_args(Scheme)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A data plane.

    Attributes:
        scheme: ``grpc`` or ``tcp``.
        address: ``host:port``; without a host, the one at which the receiver was called. Empty for
            ``grpc``: the channel of the call itself.
        ticket: to be shown when a stream is opened there.
    """

    scheme: Scheme
    address: str = ""
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The receiver's reply to a header: it is admitted, and the destination is allocated.

    Attributes:
        handoff_id: echoed.
        cache_id: the name that the cache will have.
        receiver_epoch: to be echoed in open.
        lease_s: as granted.
        held_blocks: blocks that need not be sent.
        mapper: digest of the chosen one, or ``none``.
        codec: what the receiver will decode.
        endpoints: data planes, the preferred one first.
        already_installed: nothing needs to be sent.
        allocate_s: spent on allocating and pre-faulting the destination.
        check_s: spent on checking the header.
    """

    handoff_id: str
    cache_id: str
    receiver_epoch: str
    lease_s: float
    held_blocks: tuple[int, ...] = ()
    mapper: str = "none"
    codec: str = ""
    endpoints: tuple[Endpoint, ...] = (Endpoint("grpc"),)
    already_installed: bool = False
    allocate_s: float = 0.0
    check_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PushReceipt:
    """The receiver's receipt of a committed stream, on its own clock.

    Attributes:
        handoff_id: echoed.
        cache_id: of the installed cache.
        state: ``Installed``.
        trust: what it is worth.
        wire_bytes: payload bytes received.
        chunk_count: chunks received.
        tail_s: last frame received to Installed.
        load_s: exposed: last frame to all decoded, plus the check of the header.
        load_busy_s: verifying and decoding, overlapped or not.
        install_s: last decode to published.
        transform_s: of these, rotating and translating.
        device_wait_s: blocks waiting for the device behind answers.
        verified_at_s: by block.
        installed_at_s: by block.
    """

    handoff_id: str
    cache_id: str
    state: str
    trust: Trust
    wire_bytes: int
    chunk_count: int
    tail_s: float = 0.0
    load_s: float = 0.0
    load_busy_s: float = 0.0
    install_s: float = 0.0
    transform_s: float = 0.0
    device_wait_s: float = 0.0
    verified_at_s: tuple[float, ...] = ()
    installed_at_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HandoffStatus:
    """Where a handoff stands at the receiver."""

    state: str
    verified_blocks: tuple[int, ...] = ()
    cache_id: str = ""
    error: CacheLinkError | None = None
    lease_left_s: float = 0.0
