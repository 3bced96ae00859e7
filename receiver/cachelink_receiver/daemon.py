"""cachelink-receiver as a process."""

from __future__ import annotations

from dataclasses import replace

from cachelink_core.engine.base import Engine
from cachelink_core.node.base_node import BaseNode
from cachelink_core.node.daemon import BuildNode, NodeDaemon
from cachelink_core.rpc.server import Listen, RpcServer, build_server
from cachelink_receiver.config import ReceiverConfig
from cachelink_receiver.node import ReceiverNode


def receiver_daemon(
    config: ReceiverConfig, engine: Engine | None = None, build_node: BuildNode = ReceiverNode
) -> NodeDaemon[ReceiverConfig]:
    """A receiver that is not started yet.

    Args:
        config: as resolved.
        engine: an engine that is loaded already; None loads the configured model.
        build_node: from parts to handler.
    """
    return NodeDaemon(config, "receiver", build_node, _server, engine)


def _server(listen: Listen, node: BaseNode) -> RpcServer:
    assert isinstance(node, ReceiverNode), "a receiver serves a ReceiverNode"
    config = node.parts.config
    assert isinstance(config, ReceiverConfig), "a receiver is built from a ReceiverConfig"
    listen = replace(listen, data_port=config.data_port)
    return build_server(
        listen, transfers=node.parts.transfers, answers=node.parts.answers, receiver=node
    )
