"""The sender as a handler."""

from __future__ import annotations

from collections.abc import Iterator

from cachelink_core.config import DaemonConfig
from cachelink_core.engine.base import Engine
from cachelink_core.errors import CacheLinkError
from cachelink_core.metrics import Role
from cachelink_core.node.arrivals import NoArrivals
from cachelink_core.node.base_node import BaseNode
from cachelink_core.node.parts import NodeParts
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.types import HandoffRequest, PrefixSource, Progress, Receipt
from cachelink_sender.captures import Captures
from cachelink_sender.config import SenderConfig
from cachelink_sender.handoffs import HandoffDefaults, Handoffs
from cachelink_sender.peers import Peers
from cachelink_sender.prefixes import HeldReader, Prefixes
from cachelink_sender.pump import Pump


class SenderNode(BaseNode):
    """A ``SenderHandler``."""

    role: Role = "sender"

    def __init__(self, parts: NodeParts, pump: type[Pump] = Pump) -> None:
        """Builds the sender on the parts of one node.

        Args:
            parts: of the node.
            pump: makes the frames of a handoff.
        """
        config = _sender_config(parts.config)
        prefixes = Prefixes(
            engine=parts.engine,
            store=parts.store,
            measured=parts.measured,
            block_tokens=config.block_tokens,
            headroom_tokens=config.headroom_tokens,
            captures=_captures(config, parts.engine),
        )
        self._prefixes = prefixes
        self._peers = Peers(config.receivers)
        self._handoffs = Handoffs(
            engine=parts.engine,
            store=parts.store,
            prefixes=prefixes,
            peers=self._peers,
            metrics=parts.metrics,
            measured=parts.measured,
            answers=lambda: parts.answers.in_use,
            defaults=HandoffDefaults(
                codec=config.codec,
                stream=config.stream,
                block_tokens=config.block_tokens,
                lease_s=config.lease,
                link_bytes_per_s=config.link_rate,
                data_planes=config.data_planes,
            ),
            pump=pump,
        )
        self.epoch = self._handoffs.epoch
        super().__init__(
            parts,
            reader=HeldReader(prefixes, parts.store),
            arrivals=NoArrivals(),
            block_tokens=config.block_tokens,
            overlap="share",
        )

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names that this sender may push to."""
        return self._peers.names

    def handoff(self, request: HandoffRequest, call: Call) -> Iterator[Progress | Receipt]:
        """See ``SenderHandler.handoff``."""
        try:
            yield from self._handoffs.handoff(request, call)
        except CacheLinkError as error:
            self.parts.metrics.failed(error)
            raise

    def prefill(self, prefix: PrefixSource, call: Call) -> Iterator[Progress | Receipt]:
        """See ``SenderHandler.prefill``."""
        try:
            yield from self._handoffs.prefill(prefix, call)
        except CacheLinkError as error:
            self.parts.metrics.failed(error)
            raise

    def close(self) -> None:
        """Ends what is written to disk, closes the channels and frees every cache."""
        self._prefixes.close()
        self._peers.close()
        super().close()


def _captures(config: SenderConfig, engine: Engine) -> Captures | None:
    if config.capture_dir is None:
        return None
    return Captures(
        config.capture_dir,
        config.capture_budget,
        engine=engine,
        block_tokens=config.block_tokens,
    )


def _sender_config(config: DaemonConfig) -> SenderConfig:
    assert isinstance(config, SenderConfig), "a sender is built from a SenderConfig"
    return config
