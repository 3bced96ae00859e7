"""``/metrics``, ``/healthz`` and ``/readyz`` over plain HTTP.

``/healthz`` says that the process answers: restart it when this fails. ``/readyz`` says that it takes
work: send none while this is 503; its body names what is missing. Nothing served here names a
document, a cache or a tenant.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from cachelink_core import logs
from cachelink_core.errors import ConfigError

Exposition = Callable[[str], tuple[str, bytes]]
"""From the Accept header to a content type and a body."""

Missing = Callable[[], tuple[str, ...]]
"""What keeps the daemon from being ready; empty when it is."""

IDLE_DEADLINE_S: Final = 5.0
"""A client that sends nothing for this long is cut: it holds a thread."""

_JSON: Final = "application/json"
_log = logs.logger(__name__)


class HttpServer:
    """Serves from its construction until ``stop``.

    Args:
        host: interface to bind.
        port: 0 lets the system pick; ``port`` is the one it picked.
        exposition: see ``Metrics.exposition``.
        missing: see ``Readiness.missing``.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, exposition: Exposition, missing: Missing) -> None:
        try:
            self._server = _Server(host, port, exposition, missing)
        except OSError as error:
            raise ConfigError(f"http {host}:{port} cannot be bound: {error}") from error
        self.host = host
        self.port: int = self._server.server_address[1]
        # The interval only bounds how long ``stop`` takes; requests wake the loop at once.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http")
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port``, with the real port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def stop(self) -> None:
        """Closes the socket; requests under way may still end. A second call does nothing."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """One thread a request; none of them keeps the process alive."""

    daemon_threads = True

    def __init__(self, host: str, port: int, exposition: Exposition, missing: Missing) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.exposition = exposition
        self.missing = missing
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Binds without the reverse name look-up of the standard library, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """A scraper that hangs up is no traceback on standard error."""
        _log.warning("http_request_failed", peer=str(client_address), exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "cachelink"
    sys_version = ""
    timeout = IDLE_DEADLINE_S

    def do_GET(self) -> None:
        """Answers the three paths."""
        status, content_type, body = self._route(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def _route(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        if path == "/metrics":
            return HTTPStatus.OK, *self.server.exposition(self.headers.get("Accept", ""))
        if path == "/healthz":
            return HTTPStatus.OK, _JSON, _json({"alive": True})
        if path == "/readyz":
            missing = self.server.missing()
            status = HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK
            return status, _JSON, _json({"ready": not missing, "missing": missing})
        paths = ["/metrics", "/healthz", "/readyz"]
        return HTTPStatus.NOT_FOUND, _JSON, _json({"error": "no such path", "paths": paths})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are logged at debug level: probes come every few seconds."""
        _log.debug("http_request", line=format % args)


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
