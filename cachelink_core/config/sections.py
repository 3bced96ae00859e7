"""The sections that both daemons have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from cachelink_core.config.base import Section
from cachelink_core.config.values import Duration, Name, Port, Size, written
from cachelink_core.errors import ConfigError

ModelDType = Literal["auto", "float32", "bfloat16", "float16"]


class Model(Section):
    """The model of this node."""

    name: Annotated[str, Field(min_length=1)] = "demo"
    """A hub name, a local folder, a GGUF file, or demo (SmolLM2-135M-Instruct)."""

    dtype: ModelDType = "auto"
    """Of weights and cache; auto takes the one that the weights are stored in."""

    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes the first CUDA device, or the CPU without one."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel. Answers are equal bit for bit between nodes of the same one only."""

    max_positions: Annotated[int, Field(ge=1)] | None = None
    """A shorter window than the model's, in tokens. Nodes that hand over caches need the same."""

    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of one operation; null leaves it to the runtime."""

    cache_dir: Path | None = None
    """Where converted weights and digests are kept; null takes the user's cache folder."""


class Codecs(Section):
    """How quantized caches are computed."""

    backend: Literal["auto", "eager", "compiled"] = "auto"
    """compiled: int8 and int4 in less time, a start some 15 s longer; auto: on a CUDA device only."""


class Listen(Section):
    """Where a server listens. Port 0 lets the system pick; the ready line has the real one."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Interface to bind."""

    port: Port = 0
    """TCP port; 0 lets the system pick."""


class HttpListen(Listen):
    """Where metrics and health are served, in plain HTTP."""

    allow_remote: bool = False
    """Serve them beyond this machine too. They name no document, cache or tenant."""


class Tls(Section):
    """TLS of the gRPC server, from PEM files. Without a certificate it speaks plain text."""

    certificate: Path | None = None
    """Certificate chain, this node's own first."""

    key: Path | None = None
    """Private key of the certificate."""

    ca: Path | None = None
    """Roots that clients' certificates must lead to; with it every client needs a certificate."""

    @model_validator(mode="after")
    def _complete(self) -> Tls:
        if (self.certificate is None) != (self.key is None):
            raise ValueError(
                f"certificate is {self.certificate}, key is {self.key}: give both or neither"
            )
        if self.ca is not None and self.certificate is None:
            raise ValueError(f"ca is {self.ca}, but there is no certificate")
        return self


class Token(Section):
    """A secret: written here, or in a file of its own. A plain string is a ``value``."""

    value: SecretStr | None = None
    """The secret itself."""

    file: Path | None = None
    """A file that holds it; white space around it is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: object) -> object:
        return {"value": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _exactly_one(self) -> Token:
        if (self.value is None) == (self.file is None):
            raise ValueError("give either value or file")
        if self.value is not None and not self.value.get_secret_value().strip():
            raise ValueError("the token is empty")
        return self

    def read(self) -> str:
        """The secret.

        Raises:
            ConfigError: the file is missing, unreadable or empty.
        """
        if self.value is not None:
            return self.value.get_secret_value()
        assert self.file is not None, "validated"
        try:
            secret = self.file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token file {self.file} cannot be read: {error}") from error
        if not secret:
            raise ConfigError(f"token file {self.file} is empty")
        return secret


class Auth(Section):
    """Who may call. Without tokens every caller is the tenant ``default``."""

    tokens: dict[Name, Token] = Field(default_factory=dict)
    """Tenant → its bearer token of 16 characters or more, as text or as {file: path}."""

    def tenants_by_token(self) -> dict[str, str]:
        """Reads all tokens: token → tenant.

        Raises:
            ConfigError: a file cannot be read, or two tenants have the same token.
        """
        found: dict[str, str] = {}
        for tenant, token in self.tokens.items():
            other = found.setdefault(token.read(), tenant)
            if other != tenant:
                raise ConfigError(f"auth.tokens: {other!r} and {tenant!r} have the same token")
        return found


class Store(Section):
    """The caches that this node keeps."""

    budget: Size = written("4GB")
    """Bytes that caches may take, those under way included, such as 4GB or 512MiB."""

    ttl: Duration = written("1h")
    """A cache that was not used for this long is dropped."""


class Slots(Section):
    """How much may run at once; more is refused, so that control calls always get a thread."""

    transfers: Annotated[int, Field(ge=1, le=1024)] = 4
    """Handoffs under way."""

    answers: Annotated[int, Field(ge=1, le=1024)] = 4
    """Answers under way."""


class Log(Section):
    """Logs on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is written."""

    format: Literal["json", "console"] = "json"
    """json for machines, console for people."""

    @field_validator("level", mode="before")
    @classmethod
    def _any_case(cls, given: object) -> object:
        return given.lower() if isinstance(given, str) else given
