"""The HTTP side over a real socket."""

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from cachelink_core.errors import ConfigError
from cachelink_core.http import HttpServer
from cachelink_core.lifecycle import Readiness
from cachelink_core.metrics import Metrics

Reply = tuple[int, str, bytes]


@pytest.fixture
def readiness() -> Readiness:
    return Readiness("model", "self_check")


@pytest.fixture
def server(readiness: Readiness) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, Metrics("sender").exposition, readiness.missing)
    yield server
    server.stop()


def ask(server: HttpServer, path: str, method: str = "GET", accept: str = "") -> Reply:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    try:
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        reply = connection.getresponse()
        return reply.status, reply.headers["Content-Type"], reply.read()
    finally:
        connection.close()


def test_the_real_port_is_known(server: HttpServer) -> None:
    assert server.port > 0
    assert server.address == f"127.0.0.1:{server.port}"


def test_metrics_in_the_form_that_is_asked_for(server: HttpServer) -> None:
    status, kind, body = ask(server, "/metrics")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert b'cachelink_build_info{role="sender"' in body
    _, kind, body = ask(server, "/metrics?x=1", accept="application/openmetrics-text")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_ready_only_when_nothing_is_missing(server: HttpServer, readiness: Readiness) -> None:
    assert ask(server, "/healthz")[0] == 200
    for missing in (["model", "self_check"], ["self_check"]):
        status, _, body = ask(server, "/readyz")
        assert (status, json.loads(body)) == (503, {"ready": False, "missing": missing})
        readiness.done(missing[0])
    status, _, body = ask(server, "/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "missing": []})
    readiness.drain()
    status, _, body = ask(server, "/readyz")
    assert (status, json.loads(body)) == (503, {"ready": False, "missing": ["draining"]})
    assert ask(server, "/healthz")[0] == 200


def test_head_has_no_body(server: HttpServer) -> None:
    assert ask(server, "/readyz", method="HEAD") == (503, "application/json", b"")


def test_nothing_else_is_served(server: HttpServer) -> None:
    assert ask(server, "/")[0] == 404
    assert ask(server, "/../etc/passwd")[0] == 404
    assert ask(server, "/metrics", method="POST")[0] == 501


def test_a_silent_client_holds_up_nobody(server: HttpServer) -> None:
    with socket.create_connection((server.host, server.port)):
        assert ask(server, "/healthz")[0] == 200


def test_a_port_that_is_taken_is_named(server: HttpServer) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}"):
        HttpServer("127.0.0.1", server.port, Metrics("sender").exposition, tuple)


def test_stopped_means_closed() -> None:
    server = HttpServer("::1", 0, Metrics("sender").exposition, tuple)
    assert server.address == f"[::1]:{server.port}"
    assert ask(server, "/readyz")[0] == 200
    server.stop()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/healthz")
