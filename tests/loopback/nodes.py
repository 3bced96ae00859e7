"""Two real daemons in this process, on port 0, over a tiny model. Used by the tests beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cachelink_core.engine.loading import load_engine
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.node.daemon import NodeDaemon
from cachelink_core.rpc.client import ReceiverClient, SenderClient
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.testing.tiny_models import save_tiny
from cachelink_receiver.config import ReceiverConfig
from cachelink_receiver.daemon import receiver_daemon
from cachelink_receiver.node import ReceiverNode
from cachelink_sender.config import SenderConfig
from cachelink_sender.daemon import sender_daemon
from cachelink_sender.node import SenderNode

BLOCK_TOKENS = 16
PORT_0 = {"port": 0}


@dataclass
class Pair:
    """A sender and a receiver with clients of each.

    Both engines hold equal weights but are objects of their own: nothing but bytes passes between.
    """

    sender: NodeDaemon[SenderConfig]
    receiver: NodeDaemon[ReceiverConfig]
    ask_sender: SenderClient
    ask_receiver: ReceiverClient
    transfer: TransferClient

    @property
    def sender_engine(self) -> TransformersEngine:
        return self.sender_node.parts.engine  # type: ignore[return-value]

    @property
    def receiver_engine(self) -> TransformersEngine:
        return self.receiver_node.parts.engine  # type: ignore[return-value]

    @property
    def sender_node(self) -> SenderNode:
        assert isinstance(self.sender.node, SenderNode)
        return self.sender.node

    @property
    def receiver_node(self) -> ReceiverNode:
        assert isinstance(self.receiver.node, ReceiverNode)
        return self.receiver.node

    def clear(self) -> None:
        """Evicts every cache on both sides."""
        for client in (self.ask_sender, self.ask_receiver):
            for cache in client.caches().caches:
                client.evict(cache.cache_id)


def tiny_engine(folder: Path, family: str, dtype: str = "float32", **kwargs) -> TransformersEngine:
    """Saves and loads a tiny model: the way a daemon gets one."""
    place = folder / f"{family}-{dtype}"
    if not place.exists():
        save_tiny(family, place, **kwargs)
    return load_engine(str(place), dtype=dtype, device="cpu", cache_dir=folder / "cache")


@contextmanager
def receiver_of(
    engine: TransformersEngine, make=receiver_daemon, **config
) -> Iterator[NodeDaemon[ReceiverConfig]]:
    options = {"listen": PORT_0, "http": PORT_0, "headroom_tokens": 64, **config}
    daemon = make(ReceiverConfig(**options), engine)
    try:
        daemon.addresses = daemon.start()  # type: ignore[attr-defined]
        yield daemon
    finally:
        daemon.stop()


@contextmanager
def sender_of(
    engine: TransformersEngine, receivers: dict[str, str], make=sender_daemon, **config
) -> Iterator[NodeDaemon[SenderConfig]]:
    options = {
        "listen": PORT_0,
        "http": PORT_0,
        "headroom_tokens": 64,
        "block_tokens": BLOCK_TOKENS,
        "receivers": receivers,
        **config,
    }
    daemon = make(SenderConfig(**options), engine)
    try:
        daemon.addresses = daemon.start()  # type: ignore[attr-defined]
        yield daemon
    finally:
        daemon.stop()


@contextmanager
def pair_of(
    sending: TransformersEngine,
    receiving: TransformersEngine,
    sender_config: dict | None = None,
    receiver_config: dict | None = None,
    make_sender=sender_daemon,
    make_receiver=receiver_daemon,
) -> Iterator[Pair]:
    with receiver_of(receiving, make_receiver, **(receiver_config or {})) as receiver:
        address = receiver.addresses["grpc"]  # type: ignore[attr-defined]
        with (
            sender_of(sending, {"local": address}, make_sender, **(sender_config or {})) as sender,
            SenderClient(sender.addresses["grpc"]) as ask_sender,  # type: ignore[attr-defined]
            ReceiverClient(address) as ask_receiver,
            TransferClient(address) as transfer,
        ):
            yield Pair(sender, receiver, ask_sender, ask_receiver, transfer)
