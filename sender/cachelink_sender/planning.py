"""Which codec a handoff takes, or whether the receiver had better read the prefix itself."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cachelink_core.codec_spec import Trust, parse_codec
from cachelink_core.engine.base import Engine, Prefix
from cachelink_core.errors import InsufficientTrust
from cachelink_core.identity import ModelIdentity
from cachelink_core.manifest import MAPPER_NONE
from cachelink_core.node.measured import Measured
from cachelink_core.planner import TEXT, Job, Plan, Wanted, Way, choose, transfer_ways
from cachelink_core.planner.readings import Load, measures_of
from cachelink_core.planner.shape import shape_of
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.types import HandoffRequest
from cachelink_sender.prefixes import Prefixes

AUTO = "auto"
"""The codec of a request that leaves the choice to the planner."""


class HandoffPlanner:
    """Decides from what this sender measured towards a receiver, and what that one says of itself."""

    def __init__(
        self,
        *,
        engine: Engine,
        prefixes: Prefixes,
        measured: Measured,
        answers: Callable[[], int],
        block_tokens: int,
        expected_bytes_per_s: float,
    ) -> None:
        """Binds the node's parts.

        Args:
            engine: of the sender's model.
            prefixes: what it holds already.
            measured: what it decides on.
            answers: under way at this node.
            block_tokens: the prefill schedule.
            expected_bytes_per_s: of a link over which nothing was sent yet.
        """
        self._identity: ModelIdentity = engine.identity
        # Nobody has a use for the text of a bytes-only model.
        self._texts: tuple[Way, ...] = () if engine.bytes_only else (TEXT,)
        self._prefixes = prefixes
        self._measured = measured
        self._answers = answers
        self._shape = shape_of(engine.identity.layers, engine.identity.dtype, block_tokens)
        self._expected_bytes_per_s = expected_bytes_per_s

    def plan(
        self, request: HandoffRequest, prefix: Prefix, tenant: str, client: TransferClient
    ) -> Plan:
        """Asks the receiver how fast and how busy it is, and picks a way.

        Raises:
            InsufficientTrust: no way is good enough for the request.
            CacheLinkError: the receiver cannot be asked.
        """
        receiver = client.node_info()
        same_model = receiver.identity == self._identity
        tokens = len(prefix.ids)
        job = Job(
            shape=self._shape,
            tokens=tokens,
            held_tokens=self._prefixes.held_tokens(prefix.ids, tenant),
            stream=request.stream,
            questions=request.questions,
        )
        measures = measures_of(
            self._measured.snapshot(),
            receiver.measurements,
            request.receiver,
            load=Load(
                sender_answers=self._answers(),
                sender_prefills=self._prefixes.running,
                transfers=receiver.transfers,
                receiver_answers=receiver.answers,
            ),
            expected_bytes_per_s=self._expected_bytes_per_s,
            same_model=same_model,
        )
        wanted = Wanted(request.least_trust, request.max_error)
        ways = transfer_ways(self._identity.dtype, mapped=is_mapped(request))
        plan = choose((*ways, *self._texts), job, measures, wanted)
        if plan.chosen and not plan.text:
            return plan
        good = [way.name for way in ways if not wanted.refusal(way, self._identity.dtype)]
        timed = {p.way for p in plan.predictions if p.total_s is not None}
        if good and not timed.intersection(good):
            # A transfer that cannot be predicted is tried, and measured, rather than given up.
            why = f"nothing to predict from yet; {plan.why}"
            return msgspec.structs.replace(plan, chosen=good[0], why=why, predicted_s=None)
        if not plan.chosen:
            raise InsufficientTrust(plan.why)
        return plan


def is_mapped(request: HandoffRequest) -> bool:
    """Whether a request asks for a translation."""
    return (request.mapper or MAPPER_NONE) != MAPPER_NONE


def check_wanted(request: HandoffRequest, codec: str, dtype: str) -> None:
    """Checks that a codec that was named is good enough for what else the request asks for.

    Raises:
        UnknownCodec: there is no such codec.
        UnknownPacking: there is no such packing.
        InsufficientTrust: it is not good enough.
    """
    parse_codec(codec)
    least: Trust = request.least_trust
    refused = Wanted(least, request.max_error).refusal(Way(codec, is_mapped(request)), dtype)
    if refused:
        raise InsufficientTrust(f"codec {codec}: {refused}")
