"""The gRPC server of a daemon.

Bind rules: loopback needs nothing; any other address is refused without TLS or tokens, unless the
operator says that the network is trusted. Port 0 takes a free port, which ``RpcServer.port`` tells.

Threads: one for each transfer and answer slot, and ``limits.RESERVED_CONTROL_THREADS`` besides. Slots
refuse at once, so health and control calls always get a thread.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cachelink_core import limits
from cachelink_core.errors import ConfigError
from cachelink_core.rpc.adapters import (
    TRANSFER_SERVICE,
    Gate,
    ReceiverAdapter,
    SenderAdapter,
    TransferAdapter,
)
from cachelink_core.rpc.auth import TokenInterceptor, Tokens
from cachelink_core.rpc.channel import KEEPALIVE, Keepalive, server_options
from cachelink_core.rpc.handlers import ReceiverHandler, SenderHandler
from cachelink_core.rpc.pb.cachelink.v1 import receiver_pb2_grpc, sender_pb2_grpc
from cachelink_core.rpc.slots import Slots
from cachelink_core.rpc.tcp_server import TcpServer
from cachelink_core.rpc.tls import TlsFiles, server_credentials

SENDER_SERVICE: Final = "cachelink.v1.SenderService"
RECEIVER_SERVICE: Final = "cachelink.v1.ReceiverService"

_HEADROOM_RPCS: Final = 64
"""Calls beyond the threads that may wait (health watches among them) before gRPC refuses any."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a server listens, and whom it lets in.

    Attributes:
        address: ``host:port``; port 0 for a free one.
        tls: None for plaintext.
        tokens: bearer tokens by tenant.
        allow_insecure: permits an address that others can reach, without TLS and tokens.
        reflection: serve the schema to tools such as grpcurl.
        keepalive: when a silent peer is given up.
        data_port: TCP port of the plane ``tcp`` on the same interface, 0 for a free one; None to
            offer gRPC alone. Only a receiver has data planes.
    """

    address: str = "127.0.0.1:0"
    tls: TlsFiles | None = None
    tokens: Tokens = field(default_factory=Tokens)
    allow_insecure: bool = False
    reflection: bool = True
    keepalive: Keepalive = KEEPALIVE
    data_port: int | None = None

    def check(self) -> None:
        """Checks the bind rules.

        Raises:
            ConfigError: others could reach it, and nothing asks who they are.
        """
        if self.allow_insecure or self.tls is not None or self.tokens:
            return
        if not is_loopback(self.address):
            raise ConfigError(
                f"listen address {self.address} can be reached by others; give it TLS or tokens, "
                "or set allow_insecure"
            )


class RpcServer:
    """A server that is bound but not yet serving.

    Attributes:
        port: the real one.
        address: ``host:port`` with it.
        data_address: of the plane ``tcp``; empty without one.
    """

    def __init__(
        self,
        server: grpc.Server,
        health_servicer: Any,
        services: Sequence[str],
        listen: Listen,
        tcp: TcpServer | None = None,
    ) -> None:
        self._server = server
        self._tcp = tcp
        self._health = health_servicer
        self._services = ("", *services)
        self.port = _bind(server, listen)
        host = listen.address.rpartition(":")[0]
        self.address = f"{host}:{self.port}"
        self.data_address = f"{host}:{tcp.port}" if tcp is not None else ""

    def start(self) -> None:
        """Takes calls; health still says NOT_SERVING."""
        self.set_serving(serving=False)
        if self._tcp is not None:
            self._tcp.start()
        self._server.start()

    def set_serving(self, *, serving: bool) -> None:
        """Sets what grpc.health.v1 says of every service and of the whole."""
        kinds = health_pb2.HealthCheckResponse
        for service in self._services:
            self._health.set(service, kinds.SERVING if serving else kinds.NOT_SERVING)

    def enter_graceful_shutdown(self) -> None:
        """Health says NOT_SERVING from now on, whatever is set later; calls are still taken."""
        self._health.enter_graceful_shutdown()

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, lets running ones end for ``grace_s``, then cancels them.

        Returns:
            Whether every call had ended in time.
        """
        began_s = time.monotonic()
        self._server.stop(grace_s).wait(grace_s + limits.CONNECT_DEADLINE_S)
        if self._tcp is not None:
            self._tcp.stop()
        return time.monotonic() - began_s <= grace_s


def build_server(
    listen: Listen,
    *,
    transfers: Slots,
    answers: Slots,
    sender: SenderHandler | None = None,
    receiver: ReceiverHandler | None = None,
    stall_s: float = limits.STALL_DEADLINE_S,
) -> RpcServer:
    """Builds and binds a server for one daemon.

    Args:
        listen: where, and for whom.
        transfers: slots of streams and handoffs; the daemon closes them to drain.
        answers: slots of answers.
        sender: serves ``SenderService``.
        receiver: serves ``TransferService`` and ``ReceiverService``.
        stall_s: how long a stream of chunks may be silent.

    Raises:
        ConfigError: the bind rules forbid the address, or it cannot be bound, or a TLS file is
            missing.
    """
    listen.check()
    threads = transfers.limit + answers.limit + limits.RESERVED_CONTROL_THREADS
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="cachelink-rpc"),
        interceptors=[TokenInterceptor(listen.tokens)] if listen.tokens else [],
        options=server_options(listen.keepalive),
        maximum_concurrent_rpcs=threads + _HEADROOM_RPCS,
    )
    gate = Gate(listen.tokens, transfers, answers, stall_s)
    services: list[str] = []
    tcp: TcpServer | None = None
    if sender is not None:
        sender_pb2_grpc.add_SenderServiceServicer_to_server(SenderAdapter(sender, gate), server)
        services.append(SENDER_SERVICE)
    if receiver is not None:
        receiver_pb2_grpc.add_ReceiverServiceServicer_to_server(
            ReceiverAdapter(receiver, gate), server
        )
        tcp = _tcp_plane(listen, receiver, gate)
        server.add_generic_rpc_handlers((TransferAdapter(receiver, gate, tcp).service(),))
        services += [RECEIVER_SERVICE, TRANSFER_SERVICE]
    servicer = health.HealthServicer(
        # A watch would otherwise hold a thread of the pool for as long as its client lives.
        experimental_non_blocking=True,
        experimental_thread_pool=ThreadPoolExecutor(1, thread_name_prefix="cachelink-health"),
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if listen.reflection:
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return RpcServer(server, servicer, services, listen, tcp)


def _tcp_plane(listen: Listen, receiver: ReceiverHandler, gate: Gate) -> TcpServer | None:
    if listen.data_port is None:
        return None
    return TcpServer(
        listen.address.rpartition(":")[0].strip("[]"),
        listen.data_port,
        tls=listen.tls,
        handler=receiver,
        slots=gate.transfers,
        stall_s=gate.stall_s,
    )


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``host:port``."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(server: grpc.Server, listen: Listen) -> int:
    try:
        if listen.tls is None:
            return server.add_insecure_port(listen.address)
        return server.add_secure_port(listen.address, server_credentials(listen.tls))
    except RuntimeError as error:
        raise ConfigError(f"listen address {listen.address} cannot be bound: {error}") from error
