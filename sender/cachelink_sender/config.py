"""The options of cachelink-sender."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from cachelink_core import limits
from cachelink_core.codec_spec import parse_codec
from cachelink_core.config import (
    Address,
    DaemonConfig,
    Duration,
    HttpListen,
    Listen,
    Name,
    Port,
    Rate,
    Section,
    Size,
    Token,
    written,
)
from cachelink_core.errors import CacheLinkError


class SenderListen(Listen):
    """The gRPC server."""

    port: Port = 7401
    """TCP port; 0 lets the system pick."""


class SenderHttp(HttpListen):
    """The HTTP server."""

    port: Port = 7402
    """TCP port; 0 lets the system pick."""


class PeerTls(Section):
    """TLS towards one receiver, from PEM files. ``tls: {}`` trusts the system's roots."""

    ca: Path | None = None
    """Roots that the receiver's certificate must lead to; null takes the system's."""

    certificate: Path | None = None
    """Certificate that this node shows, where the receiver wants one."""

    key: Path | None = None
    """Private key of the certificate."""

    @model_validator(mode="after")
    def _complete(self) -> PeerTls:
        if (self.certificate is None) != (self.key is None):
            raise ValueError(
                f"certificate is {self.certificate}, key is {self.key}: give both or neither"
            )
        return self


class Peer(Section):
    """One receiver that this sender may push to. A plain string is an ``address``."""

    address: Address
    """host:port of its gRPC server."""

    tls: PeerTls | None = None
    """TLS of the channel; null is plain text."""

    token: Token | None = None
    """Bearer token that the receiver gave this sender, as text or as {file: path}."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: object) -> object:
        return {"address": given} if isinstance(given, str) else given


class SenderConfig(DaemonConfig):
    """Prefills prefixes and hands their caches over to receivers."""

    program: ClassVar[str] = "cachelink-sender"

    listen: SenderListen = Field(default_factory=SenderListen)
    """The gRPC server."""

    http: SenderHttp = Field(default_factory=SenderHttp)
    """The HTTP server: /metrics, /healthz, /readyz."""

    receivers: dict[Name, Peer] = Field(default_factory=dict)
    """Name → receiver: the only places that a cache may be pushed to. name=host:port is enough."""

    codec: str = "native"
    """Codec of a handoff that names none: auto, native, bf16, int8 or int4, each perhaps with +zstd."""

    stream: bool = True
    """Send each block as soon as it is prefilled; false prefills everything first."""

    block_tokens: Annotated[int, Field(ge=limits.MIN_BLOCK_TOKENS, le=limits.MAX_BLOCK_TOKENS)] = (
        limits.DEFAULT_BLOCK_TOKENS
    )
    """Tokens of one block, the unit of prefill and of overlap."""

    lease: Annotated[Duration, Field(ge=limits.MIN_LEASE_S, le=limits.MAX_LEASE_S)] = written("30s")
    """Without progress for this long the receiver frees a handoff that names no lease."""

    link_rate: Annotated[Rate, Field(gt=0)] = written("50MB/s")
    """The slowest link to expect, such as 1GB/s or 10Gbit/s; deadlines follow from it."""

    data_planes: tuple[Literal["grpc", "tcp"], ...] = ("tcp", "grpc")
    """How chunks may travel; tcp is taken where a receiver offers it and can be reached, else grpc."""

    capture_dir: Path | None = None
    """Folder where prefilled caches are kept on disk, so that none is read twice; null keeps none."""

    capture_budget: Annotated[Size, Field(gt=0)] = written("20GB")
    """Bytes that one model's captured caches may take; those unused for longest go first."""

    @field_validator("codec")
    @classmethod
    def _codec_exists(cls, text: str) -> str:
        if text == "auto":
            return text
        try:
            parse_codec(text)
        except CacheLinkError as error:
            raise ValueError(str(error)) from error
        return text
