"""What a sender and a receiver serve alike: Answer, the list of caches, and who they are."""

from __future__ import annotations

from collections.abc import Iterator

from cachelink_core import __version__
from cachelink_core.codec_spec import CODECS, PACKINGS
from cachelink_core.errors import CacheLinkError
from cachelink_core.logs import bound, logger
from cachelink_core.manifest import SCHEMA_VERSION
from cachelink_core.metrics import Role
from cachelink_core.node.answering import AnswerService
from cachelink_core.node.arrivals import Arrivals
from cachelink_core.node.choosing import Chooser
from cachelink_core.node.contexts import Contexts, OverlapPolicy, Reader
from cachelink_core.node.parts import NodeParts
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.types import (
    AnswerRequest,
    CacheInfo,
    CacheList,
    Delta,
    Final,
    NodeInfo,
)

_log = logger(__name__)


class BaseNode:
    """A ``NodeHandler`` over the parts of one node."""

    role: Role
    epoch: str
    version = __version__
    """Of the distribution, as the node tells it."""

    def __init__(
        self,
        parts: NodeParts,
        *,
        reader: Reader,
        arrivals: Arrivals,
        block_tokens: int,
        overlap: OverlapPolicy,
        default_wait_s: float = 0.0,
    ) -> None:
        """Binds the parts.

        Args:
            parts: of this node.
            reader: reads prefixes here.
            arrivals: handoffs under way at this node.
            block_tokens: the prefill schedule.
            overlap: what a question does that finds its cache busy.
            default_wait_s: for a handoff under way, when a question does not say.
        """
        self.parts = parts
        headroom = parts.config.headroom_tokens
        contexts = Contexts(
            engine=parts.engine,
            store=parts.store,
            memory=parts.memory,
            reader=reader,
            arrivals=arrivals,
            chooser=Chooser(
                engine=parts.engine,
                store=parts.store,
                memory=parts.memory,
                arrivals=arrivals,
                measured=parts.measured,
                answers=lambda: parts.answers.in_use,
                block_tokens=block_tokens,
                in_line=overlap == "wait",
            ),
            metrics=parts.metrics,
            headroom_tokens=headroom,
            overlap=overlap,
            default_wait_s=default_wait_s,
        )
        self._answers = AnswerService(
            engine=parts.engine,
            store=parts.store,
            contexts=contexts,
            metrics=parts.metrics,
            measured=parts.measured,
            block_tokens=block_tokens,
            headroom_tokens=headroom,
        )

    def answer(self, request: AnswerRequest, call: Call) -> Iterator[Delta | Final]:
        """See ``NodeHandler.answer``."""
        try:
            yield from self._answers.answer(request, call)
        except CacheLinkError as error:
            self.parts.metrics.failed(error)
            with bound(peer=call.peer, tenant=call.tenant):
                _log.warning("answer_failed", reason=error.reason, error=str(error))
            raise

    def caches(self, call: Call) -> CacheList:
        """See ``NodeHandler.caches``."""
        stats = self.parts.store.stats()
        return CacheList(
            caches=tuple(
                CacheInfo(
                    cache_id=listed.stored.cache_id,
                    handoff_id=listed.stored.handoff_id,
                    tokens=len(listed.stored.ids),
                    bytes=listed.nbytes,
                    trust=listed.stored.trust,
                    codec=listed.stored.codec,
                    age_s=listed.age_s,
                    idle_s=listed.idle_s,
                    pins=listed.pins,
                )
                for listed in self.parts.store.list(call.tenant)
            ),
            used_bytes=stats.used_bytes,
            reserved_bytes=stats.reserved_bytes,
            budget_bytes=stats.budget_bytes,
        )

    def evict(self, cache_id: str, call: Call) -> int:
        """See ``NodeHandler.evict``."""
        before = self.parts.store.stats().used_bytes
        self.parts.store.evict(call.tenant, cache_id)
        _log.info("evicted", cache_id=cache_id, tenant=call.tenant)
        return max(0, before - self.parts.store.stats().used_bytes)

    def info(self, call: Call) -> NodeInfo:
        """See ``NodeHandler.info``."""
        del call
        parts = self.parts
        return NodeInfo(
            role=self.role,
            version=self.version,
            schema_version=SCHEMA_VERSION,
            epoch=self.epoch,
            identity=parts.engine.identity,
            model_name=parts.config.model.name,
            codecs=tuple(CODECS),
            packings=tuple(PACKINGS),
            receivers=self.receivers,
            max_positions=parts.engine.identity.max_positions,
            transfers=parts.transfers.in_use,
            transfer_slots=parts.transfers.limit,
            answers=parts.answers.in_use,
            answer_slots=parts.answers.limit,
            measurements=parts.measured.snapshot(),
            device=str(parts.engine.device),
            attention=parts.engine.attention,
        )

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names that this node may push to."""
        return ()

    def start(self) -> None:
        """Begins what runs beside the calls."""

    def close(self) -> None:
        """Ends what is still under way and frees every cache."""
        self.parts.store.close()
