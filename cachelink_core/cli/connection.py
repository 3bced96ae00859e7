"""How a command reaches a node: address, TLS and token, and which kind of node is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from cachelink_core import limits
from cachelink_core.errors import ConfigError, UnknownCache
from cachelink_core.rpc.client import ReceiverClient, SenderClient, TlsFiles

DEFAULT_SENDER: Final = "127.0.0.1:7401"
DEFAULT_RECEIVER: Final = "127.0.0.1:7411"

_RECEIVER_SERVICE: Final = "cachelink.v1.ReceiverService"

SenderOption = Annotated[str, typer.Option("--sender", metavar="HOST:PORT", help="The sender.")]
NodeOption = Annotated[
    str, typer.Option("--node", metavar="HOST:PORT", help="A receiver or a sender.")
]
TlsOption = Annotated[
    bool, typer.Option("--tls", help="Speak TLS; without --tls-ca the system's roots are trusted.")
]
CaOption = Annotated[
    Path | None, typer.Option("--tls-ca", metavar="FILE", help="Roots of the node's certificate.")
]
CertificateOption = Annotated[
    Path | None, typer.Option("--tls-certificate", metavar="FILE", help="Certificate to show.")
]
KeyOption = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="Private key of it.")
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="A file with the bearer token to show."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True, slots=True)
class Connection:
    """What every node of one command is reached with.

    Attributes:
        tls: speak TLS even without any file.
        ca: roots to trust; the system's without.
        certificate: to show.
        key: of the certificate.
        token_file: holds the bearer token; white space around it is dropped.
    """

    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    def sender(self, address: str) -> SenderClient:
        """A client of a sender.

        Raises:
            ConfigError: a file is missing.
        """
        return SenderClient(address, tls=self._files(), token=self._token())

    def receiver(self, address: str) -> ReceiverClient:
        """A client of a receiver.

        Raises:
            ConfigError: a file is missing.
        """
        return ReceiverClient(address, tls=self._files(), token=self._token())

    def node(self, address: str) -> SenderClient | ReceiverClient:
        """A client of whichever of the two is there: health knows the names of its services.

        Raises:
            ConfigError: a file is missing.
            LinkError: nobody answers there.
        """
        receiver = self.receiver(address)
        try:
            receiver.health(_RECEIVER_SERVICE, deadline_s=limits.CONTROL_DEADLINE_S)
        except UnknownCache:  # NOT_FOUND: no such service
            receiver.close()
            return self.sender(address)
        except BaseException:
            receiver.close()
            raise
        return receiver

    def _files(self) -> TlsFiles | None:
        named = self.ca or self.certificate or self.key
        if not (self.tls or named):
            return None
        return TlsFiles(certificate=self.certificate, key=self.key, ca=self.ca)

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token file {self.token_file} cannot be read: {error}") from error
        if not token:
            raise ConfigError(f"token file {self.token_file} is empty")
        return token
