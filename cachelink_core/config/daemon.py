"""The options that both daemons have, as one tree."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cachelink_core import limits
from cachelink_core.config.base import ENV_DELIMITER, ENV_PREFIX
from cachelink_core.config.sections import (
    Auth,
    Codecs,
    HttpListen,
    Listen,
    Log,
    Model,
    Slots,
    Store,
    Tls,
)
from cachelink_core.config.values import Duration, is_loopback, written


class DaemonConfig(BaseSettings):
    """All options of one daemon.

    Built in code it takes its arguments and nothing else; only ``load_config`` looks at a file, an
    environment and flags, and only at those that it is given.
    """

    program: ClassVar[str] = "cachelink-daemon"

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        env_parse_none_str="null",
        cli_parse_none_str="null",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )

    model: Model = Field(default_factory=Model)
    """The model of this node."""

    codecs: Codecs = Field(default_factory=Codecs)
    """How quantized caches are computed."""

    listen: Listen = Field(default_factory=Listen)
    """The gRPC server."""

    http: HttpListen = Field(default_factory=HttpListen)
    """The HTTP server: /metrics, /healthz, /readyz."""

    tls: Tls = Field(default_factory=Tls)
    """TLS of the gRPC server."""

    auth: Auth = Field(default_factory=Auth)
    """Who may call the gRPC server."""

    allow_insecure_bind: bool = False
    """Listen beyond this machine with neither TLS nor a token. Whoever reaches the port may call."""

    store: Store = Field(default_factory=Store)
    """The caches that this node keeps."""

    headroom_tokens: Annotated[int, Field(ge=1, le=limits.MAX_PREFIX_TOKENS)] = (
        limits.DEFAULT_HEADROOM_TOKENS
    )
    """Room for query and answer that every cache is allocated with."""

    slots: Slots = Field(default_factory=Slots)
    """How much may run at once."""

    log: Log = Field(default_factory=Log)
    """Logs on standard error."""

    drain: Duration = written("30s")
    """After SIGTERM, work under way may take this long; then it is cut."""

    @model_validator(mode="after")
    def _bind_is_safe(self) -> DaemonConfig:
        guarded = self.tls.certificate is not None or bool(self.auth.tokens)
        if not (is_loopback(self.listen.host) or guarded or self.allow_insecure_bind):
            raise ValueError(
                f"listen.host is {self.listen.host}, which other machines reach, with neither "
                "tls.certificate nor auth.tokens; allow_insecure_bind: true permits it"
            )
        if not (is_loopback(self.http.host) or self.http.allow_remote):
            raise ValueError(
                f"http.host is {self.http.host}, which other machines reach, and metrics have no "
                "authentication; http.allow_remote: true permits it"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        *_others: Any,
        **_named: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leaves only the arguments."""
        return (init_settings,)
