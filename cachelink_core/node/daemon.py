"""The life of a node as a process: load, check itself, serve, drain, stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from cachelink_core import limits, logs
from cachelink_core.config import DaemonConfig
from cachelink_core.engine.base import Engine
from cachelink_core.engine.compile_codecs import compile_codecs
from cachelink_core.engine.loading import load_engine, set_threads
from cachelink_core.http import HttpServer
from cachelink_core.lifecycle import Daemon, Hooks, Readiness
from cachelink_core.metrics import Metrics, Role
from cachelink_core.node.base_node import BaseNode
from cachelink_core.node.parts import NodeParts, build_parts
from cachelink_core.node.self_check import self_check
from cachelink_core.rpc.auth import Tokens
from cachelink_core.rpc.server import Listen, RpcServer
from cachelink_core.rpc.tls import TlsFiles

_log = logs.logger(__name__)


C = TypeVar("C", bound=DaemonConfig)

BuildNode = Callable[[NodeParts], BaseNode]
BuildServer = Callable[[Listen, BaseNode], RpcServer]


class NodeDaemon(Generic[C]):
    """One node: HTTP first, so that probes see it load; gRPC once it can answer."""

    def __init__(
        self,
        config: C,
        role: Role,
        build_node: BuildNode,
        build_rpc: BuildServer,
        engine: Engine | None = None,
    ) -> None:
        """Binds what makes this daemon a sender or a receiver.

        Args:
            config: as resolved.
            role: for metrics and logs.
            build_node: from parts to handler.
            build_rpc: from listen options and handler to server.
            engine: an engine that is loaded already; None loads the configured model.
        """
        self.config = config
        self.metrics = Metrics(role)
        self.readiness = Readiness("model", "self_check")
        self.node: BaseNode | None = None
        self._build_node = build_node
        self._build_rpc = build_rpc
        self._engine = engine
        self._http: HttpServer | None = None
        self._rpc: RpcServer | None = None

    def run(self) -> int:
        """Lives one life; returns the exit status."""
        return Daemon(self.hooks(), self.config.drain).run()

    def hooks(self) -> Hooks:
        """What happens at each turn of the life."""
        return Hooks(self.start, self.drain, self.wait_idle, self.stop)

    def start(self) -> Mapping[str, str]:
        """Loads, checks itself, serves; returns the addresses.

        Raises:
            CacheLinkError: whatever keeps it from serving.
        """
        config = self.config
        self._http = HttpServer(
            config.http.host, config.http.port, self.metrics.exposition, self.readiness.missing
        )
        listen = _listen(config)
        listen.check()
        engine = self._engine or self._load()
        self.readiness.done("model")
        self.metrics.codec_compile_seconds.set(
            compile_codecs(
                engine,
                config.codecs.backend,
                [self.metrics.role],
                # A receiver expects its senders to have the default.
                block_tokens=getattr(config, "block_tokens", limits.DEFAULT_BLOCK_TOKENS),
            )
        )
        took_s = self_check(engine)
        _log.info("self_check_passed", seconds=round(took_s, 3))
        self.node = self._build_node(build_parts(config, engine, self.metrics))
        self._rpc = self._build_rpc(listen, self.node)
        self.node.start()
        self._rpc.start()
        self._rpc.set_serving(serving=True)
        self.readiness.done("self_check")
        self.metrics.ready.set(1)
        addresses = {"grpc": self._rpc.address, "http": self._http.address}
        if self._rpc.data_address:
            addresses["tcp"] = self._rpc.data_address
        return addresses

    def drain(self) -> None:
        """Takes no new work from now on."""
        self.readiness.drain()
        self.metrics.ready.set(0)
        if self._rpc is not None:
            self._rpc.enter_graceful_shutdown()
        if self.node is not None:
            self.node.parts.close_slots()

    def wait_idle(self, deadline_s: float) -> bool:
        """Waits until no transfer and no answer is under way; whether that was reached."""
        if self.node is None:
            return True
        until_s = time.monotonic() + deadline_s
        parts = self.node.parts
        return all(
            slots.wait_idle(max(0.0, until_s - time.monotonic()))
            for slots in (parts.transfers, parts.answers)
        )

    def stop(self) -> None:
        """Closes everything; a second call does nothing."""
        if self._rpc is not None:
            self._rpc.stop(0.0)
            self._rpc = None
        if self.node is not None:
            self.node.close()
            self.node = None
        if self._http is not None:
            self._http.stop()
            self._http = None

    def _load(self) -> Engine:
        model = self.config.model
        if model.threads is not None:
            set_threads(model.threads)
        began = time.monotonic()
        engine = load_engine(
            model.name,
            dtype=model.dtype,
            device=model.device,
            attention=model.attention,
            max_positions=model.max_positions,
            cache_dir=model.cache_dir,
        )
        _log.info(
            "model_loaded",
            model=model.name,
            identity=engine.identity.digest()[:16],
            device=str(engine.device),
            attention=engine.attention,
            seconds=round(time.monotonic() - began, 3),
        )
        return engine


def _listen(config: DaemonConfig) -> Listen:
    tls = None
    if config.tls.certificate is not None:
        tls = TlsFiles(config.tls.certificate, config.tls.key, config.tls.ca)
    host = f"[{config.listen.host}]" if ":" in config.listen.host else config.listen.host
    return Listen(
        address=f"{host}:{config.listen.port}",
        tls=tls,
        tokens=Tokens(config.auth.tenants_by_token()),
        allow_insecure=config.allow_insecure_bind,
    )
