"""cachelink-sender as a process."""

from __future__ import annotations

from cachelink_core.engine.base import Engine
from cachelink_core.node.base_node import BaseNode
from cachelink_core.node.daemon import BuildNode, NodeDaemon
from cachelink_core.rpc.server import Listen, RpcServer, build_server
from cachelink_sender.config import SenderConfig
from cachelink_sender.node import SenderNode


def sender_daemon(
    config: SenderConfig, engine: Engine | None = None, build_node: BuildNode = SenderNode
) -> NodeDaemon[SenderConfig]:
    """A sender that is not started yet.

    Args:
        config: as resolved.
        engine: an engine that is loaded already; None loads the configured model.
        build_node: from parts to handler.
    """
    return NodeDaemon(config, "sender", build_node, _server, engine)


def _server(listen: Listen, node: BaseNode) -> RpcServer:
    assert isinstance(node, SenderNode), "a sender serves a SenderNode"
    return build_server(
        listen, transfers=node.parts.transfers, answers=node.parts.answers, sender=node
    )
