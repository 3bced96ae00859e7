"""The serial sender and the serial receiver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cachelink_bench.serial.stages import SerialPump, SerialSink
from cachelink_bench.serial.versions import SERIAL_VERSION
from cachelink_core.engine.base import Engine
from cachelink_core.node.daemon import NodeDaemon
from cachelink_core.node.parts import NodeParts
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.types import HandoffRequest, Progress, Receipt
from cachelink_receiver.config import ReceiverConfig
from cachelink_receiver.daemon import receiver_daemon
from cachelink_receiver.node import ReceiverNode
from cachelink_sender.config import SenderConfig
from cachelink_sender.daemon import sender_daemon
from cachelink_sender.node import SenderNode


class SerialSenderNode(SenderNode):
    """Reads the whole prefix, then encodes all of it, then sends all of it."""

    version = SERIAL_VERSION

    def __init__(self, parts: NodeParts) -> None:
        """Builds the sender on the parts of one node."""
        super().__init__(parts, pump=SerialPump)

    def handoff(self, request: HandoffRequest, call: Call) -> Iterator[Progress | Receipt]:
        """See ``SenderHandler.handoff``; a wish to stream is not heard."""
        return super().handoff(replace(request, stream=False), call)


class SerialReceiverNode(ReceiverNode):
    """Takes everything, then verifies and decodes everything, then installs."""

    version = SERIAL_VERSION

    def __init__(self, parts: NodeParts) -> None:
        """Builds the receiver on the parts of one node."""
        super().__init__(parts, sink=SerialSink)


def serial_sender_daemon(
    config: SenderConfig, engine: Engine | None = None
) -> NodeDaemon[SenderConfig]:
    """A serial sender that is not started yet; see ``sender_daemon``."""
    return sender_daemon(config, engine, SerialSenderNode)


def serial_receiver_daemon(
    config: ReceiverConfig, engine: Engine | None = None
) -> NodeDaemon[ReceiverConfig]:
    """A serial receiver that is not started yet; see ``receiver_daemon``."""
    return receiver_daemon(config, engine, SerialReceiverNode)
