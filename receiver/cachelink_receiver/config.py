"""The options of cachelink-receiver."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from cachelink_core import limits
from cachelink_core.config import (
    DaemonConfig,
    Duration,
    HttpListen,
    Listen,
    Port,
    Section,
    written,
)

DEFAULT_DATA_PORT: Final = 7413


class ReceiverListen(Listen):
    """The gRPC server."""

    port: Port = 7411
    """TCP port; 0 lets the system pick."""


class ReceiverHttp(HttpListen):
    """The HTTP server."""

    port: Port = 7412
    """TCP port; 0 lets the system pick."""


class DataListen(Section):
    """The data plane ``tcp``, which senders take instead of gRPC where they can reach it."""

    enabled: bool = True
    """Offer it to senders; without it they send over gRPC."""

    port: Port | None = None
    """TCP port; 0 lets the system pick, null takes 7413, or a free one where listen.port is 0."""


class ReceiverConfig(DaemonConfig):
    """Takes caches in and answers questions from them."""

    program: ClassVar[str] = "cachelink-receiver"

    listen: ReceiverListen = Field(default_factory=ReceiverListen)
    """The gRPC server."""

    http: ReceiverHttp = Field(default_factory=ReceiverHttp)
    """The HTTP server: /metrics, /healthz, /readyz."""

    data: DataListen = Field(default_factory=DataListen)
    """The second data plane: plain TCP on the interface of the gRPC server, under the same TLS."""

    max_lease: Annotated[Duration, Field(ge=limits.MIN_LEASE_S, le=limits.MAX_LEASE_S)] = written(
        "10m"
    )
    """The longest lease that a sender may ask for."""

    overlap: Literal["share", "wait", "copy"] = "share"
    """Questions to one cache at once: share it token by token, wait in order, or copy it, in budget."""

    mappers: tuple[Path, ...] = ()
    """Folders of mappers, each for one sender's model; a handoff picks by the sender's identity."""

    allow_failed_gate: bool = False
    """Use mappers that failed their quality gate or were never judged; every answer says so."""

    default_wait: Annotated[Duration, Field(le=limits.MAX_LEASE_S)] = written("30s")
    """How long a question waits for its cache to arrive when it does not say."""

    @property
    def data_port(self) -> int | None:
        """Where the plane ``tcp`` listens; None for nowhere."""
        if not self.data.enabled:
            return None
        if self.data.port is not None:
            return self.data.port
        return DEFAULT_DATA_PORT if self.listen.port else 0
