"""TLS from files.

With a CA on the server, every client must show a certificate that it signed (mTLS). A client's
certificate and key are then needed; its CA says whom it trusts (the system's roots without one).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from cachelink_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end.

    Attributes:
        certificate: the chain of this end, its own certificate first.
        key: of that certificate.
        ca: the roots that the other end's certificate must lead to.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                f"tls: certificate is {self.certificate}, key is {self.key}; give both or neither"
            )


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server; with a CA, clients must have a certificate of it.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    if files.certificate is None or files.key is None:
        raise ConfigError("tls: a server needs a certificate and a key")
    pair = (_read(files.key), _read(files.certificate))
    roots = None if files.ca is None else _read(files.ca)
    return grpc.ssl_server_credentials(
        [pair], root_certificates=roots, require_client_auth=roots is not None
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a client.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=None if files.ca is None else _read(files.ca),
        private_key=None if files.key is None else _read(files.key),
        certificate_chain=None if files.certificate is None else _read(files.certificate),
    )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The same rules as ``server_credentials``, for a plain socket.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    if files.certificate is None or files.key is None:
        raise ConfigError("tls: a server needs a certificate and a key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections are kept instead; a ticket would read as an early reply
    _load(context, files)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """The same rules as ``channel_credentials``, for a plain socket: the host's name is checked.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is None:
        context.load_default_certs()
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls: {files}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {path}: {error.strerror}") from error
