"""The receiver as a handler: the data plane, and the node's own service."""

from __future__ import annotations

from collections.abc import Iterator

from cachelink_core.config import DaemonConfig
from cachelink_core.limits import DEFAULT_BLOCK_TOKENS
from cachelink_core.metrics import Role
from cachelink_core.node.base_node import BaseNode
from cachelink_core.node.contexts import TransientReader
from cachelink_core.node.parts import NodeParts
from cachelink_core.rpc.handlers import Call, Frame
from cachelink_core.rpc.transfer_types import HandoffStatus, PushReceipt, Reservation
from cachelink_receiver.config import ReceiverConfig
from cachelink_receiver.incoming import ChunkSink
from cachelink_receiver.mappers import Mappers
from cachelink_receiver.transfers import TransferLimits, Transfers


class ReceiverNode(BaseNode):
    """A ``ReceiverHandler``."""

    role: Role = "receiver"

    def __init__(self, parts: NodeParts, sink: type[ChunkSink] = ChunkSink) -> None:
        """Builds the receiver on the parts of one node.

        Args:
            parts: of the node.
            sink: takes the chunks of a handoff.
        """
        config = _receiver_config(parts.config)
        self.transfers = Transfers(
            engine=parts.engine,
            store=parts.store,
            memory=parts.memory,
            metrics=parts.metrics,
            allowed=TransferLimits(config.headroom_tokens, config.max_lease),
            mappers=Mappers.load(
                config.mappers, parts.engine, allow_failed_gate=config.allow_failed_gate
            ),
            sink=sink,
        )
        self.epoch = self.transfers.epoch
        super().__init__(
            parts,
            reader=TransientReader(parts.engine, parts.store, parts.measured, DEFAULT_BLOCK_TOKENS),
            arrivals=self.transfers,
            block_tokens=DEFAULT_BLOCK_TOKENS,
            overlap=config.overlap,
            default_wait_s=config.default_wait,
        )

    def reserve(self, header: bytes, call: Call) -> Reservation:
        """See ``TransferHandler.reserve``."""
        return self.transfers.reserve(header, call)

    def push(self, frames: Iterator[Frame], call: Call) -> PushReceipt:
        """See ``TransferHandler.push``."""
        receipt = self.transfers.push(frames, call)
        self._note(receipt, call)
        return receipt

    def status(self, handoff_id: str, call: Call) -> HandoffStatus:
        """See ``TransferHandler.status``."""
        return self.transfers.status(handoff_id, call)

    def heartbeat(self, handoff_id: str, receiver_epoch: str, call: Call) -> float:
        """See ``TransferHandler.heartbeat``."""
        return self.transfers.heartbeat(handoff_id, receiver_epoch, call)

    def abort(self, handoff_id: str, why: str, call: Call) -> int:
        """See ``TransferHandler.abort``."""
        return self.transfers.abort(handoff_id, why, call)

    def _note(self, receipt: PushReceipt, call: Call) -> None:
        """Notes the rates of what has just arrived, unless it was evicted meanwhile."""
        stored = self.parts.store.find(call.tenant, receipt.cache_id)
        if stored is None:
            return
        mapped = stored.trust == "mapped"
        tokens = len(stored.ids)
        self.parts.measured.installed(
            stored.codec,
            tokens=tokens,
            native_bytes=tokens * stored.producer.token_bytes(),
            load_s=receipt.load_busy_s + (0.0 if mapped else receipt.transform_s),
            map_s=receipt.transform_s if mapped else 0.0,
        )

    def start(self) -> None:
        """Begins to watch the leases."""
        self.transfers.start()

    def close(self) -> None:
        """Ends every handoff and frees every cache."""
        self.transfers.stop()
        super().close()


def _receiver_config(config: DaemonConfig) -> ReceiverConfig:
    assert isinstance(config, ReceiverConfig), "a receiver is built from a ReceiverConfig"
    return config
