"""Options of every channel and server, in one place, and how a channel is opened.

Options that are not set here were measured to change nothing, or to harm (BDP probing switched off
leaves 15 % of a link of 50 ms).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachelink_core import limits
from cachelink_core.errors import PeerGone
from cachelink_core.rpc.tls import TlsFiles, channel_credentials

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When a silent peer is given up.

    A stopped process is noticed after ``time_ms + timeout_ms``, a dead link after ``timeout_ms``.

    Attributes:
        time_ms: silence before a ping.
        timeout_ms: wait for its answer.
    """

    time_ms: int = 20_000
    timeout_ms: int = 10_000


KEEPALIVE: Final = Keepalive()

_IDEMPOTENT: Final = (
    ("cachelink.v1.TransferService", "GetHandoff"),
    ("cachelink.v1.SenderService", "ListCaches"),
    ("cachelink.v1.SenderService", "GetNodeInfo"),
    ("cachelink.v1.ReceiverService", "ListCaches"),
    ("cachelink.v1.ReceiverService", "GetNodeInfo"),
)

_RETRY_POLICY: Final = {
    "maxAttempts": 3,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def client_options(*, data: bool, keepalive: Keepalive = KEEPALIVE) -> Options:
    """Options of a channel; ``data`` for one that carries streams of chunks."""
    options: Options = [
        *_keepalive_options(keepalive),
        # gRPC would send node-to-node traffic through the http_proxy of the environment.
        ("grpc.enable_http_proxy", 0),
        # A new channel is then a new connection, also to a peer that was just given up.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        *_message_limits(),
    ]
    if data:
        # A stream cannot be replayed once 256 KiB are buffered: retries would only hold memory.
        options.append(("grpc.enable_retries", 0))
    else:
        options.append(("grpc.service_config", _service_config()))
    return options


def server_options(keepalive: Keepalive = KEEPALIVE) -> Options:
    """Options of a server."""
    return [
        *_keepalive_options(keepalive),
        # A connection without calls is pinged too, and the third such ping would count as abuse and
        # end it: there the least interval that a server can be given holds for nothing.
        ("grpc.http2.max_ping_strikes", 0),
        # Two daemons on one port would each get a part of the calls; a clash must be an error.
        ("grpc.so_reuseport", 0),
        *_message_limits(),
    ]


def open_channel(
    address: str,
    tls: TlsFiles | None = None,
    *,
    data: bool = False,
    keepalive: Keepalive = KEEPALIVE,
) -> grpc.Channel:
    """Opens a channel; it connects on the first call.

    Raises:
        ConfigError: a TLS file is missing.
    """
    options = client_options(data=data, keepalive=keepalive)
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, channel_credentials(tls), options)


def open_aio_channel(
    address: str, tls: TlsFiles | None = None, *, keepalive: Keepalive = KEEPALIVE
) -> aio.Channel:
    """Opens a channel of ``grpc.aio``, for control calls and answers only.

    The asynchronous client reports a status that arrives during a write as INTERNAL, so that the
    reason of an early refusal would be lost: data streams use the synchronous one.

    Raises:
        ConfigError: a TLS file is missing.
    """
    options = client_options(data=False, keepalive=keepalive)
    if tls is None:
        return aio.insecure_channel(address, options)
    return aio.secure_channel(address, channel_credentials(tls), options)


def wait_until_ready(channel: grpc.Channel, address: str, deadline_s: float) -> None:
    """Waits for a connection, with a health check that costs one round trip.

    ``grpc.channel_ready_future`` would leave a polling thread behind, which fails when the channel
    is closed meanwhile.

    Raises:
        PeerGone: there is none within ``deadline_s``.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        stub.Check(health_pb2.HealthCheckRequest(), timeout=deadline_s, wait_for_ready=True)
    except grpc.RpcError as error:
        status = error.code() if isinstance(error, grpc.Call) else None
        if status in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            raise PeerGone(f"no connection to {address} within {deadline_s:g} s") from error
        # Any other status came from a server: there is a connection, if one without health.


def _keepalive_options(keepalive: Keepalive) -> Options:
    return [
        ("grpc.keepalive_time_ms", keepalive.time_ms),
        ("grpc.keepalive_timeout_ms", keepalive.timeout_ms),
        # Without it a ping that is lost stays pending for a minute, whatever the timeout above.
        ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _message_limits() -> Options:
    limit = max(limits.MAX_DATA_MESSAGE_BYTES, limits.MAX_CONTROL_MESSAGE_BYTES)
    return [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]


def _service_config() -> str:
    names = [{"service": service, "method": method} for service, method in _IDEMPOTENT]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]})
