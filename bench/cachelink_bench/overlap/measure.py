"""The measuring half: a client beside the senders, without torch; sets the link's rate as it goes."""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import msgspec

from cachelink_bench.emulation.namespaces import set_rate
from cachelink_bench.emulation.spec import MIN_RATE_BITS, LinkSpec
from cachelink_bench.order_process import die_with_parent
from cachelink_bench.overlap.task import Case, Failed, Measured, Nodes, Run, Task, Way
from cachelink_bench.turns import turned
from cachelink_core.errors import CacheLinkError, InternalError
from cachelink_core.rpc.client import HeldCache, Receipt, ReceiverClient, SenderClient, TokenIds
from cachelink_core.rpc.types import Timeline

_DEADLINE_S: Final = 3600.0
_WARM_RATE_BITS: Final = 10**9
_PAYLOAD_SHARE: Final = 1448 / 1514
"""Of what a shaper counts: a full frame's TCP payload over its bytes with all headers."""

_PREFILLS: Final = 3
"""Alone before the rounds; the median counts."""


class Clients:
    """One sender and its receivers, as their client sees them."""

    def __init__(self, nodes: Nodes, stack: ExitStack) -> None:
        """Opens a channel to each; ``stack`` closes them."""
        self.sender = stack.enter_context(SenderClient(nodes.sender))
        self._receivers = {
            name: stack.enter_context(ReceiverClient(address))
            for name, address in nodes.receivers.items()
        }

    def handoff(self, source: TokenIds | HeldCache, case: Case) -> Receipt:
        """One handoff, after which the receiver forgets the cache."""
        receipt = self.sender.handoff(
            source, case.receiver, codec=case.codec, mapper=case.mapper, deadline_s=_DEADLINE_S
        )
        if receipt.already_installed:
            raise InternalError(f"{case.name}: the receiver had the cache already")
        self._receivers[case.receiver].evict(receipt.cache_id)
        return receipt


class Measurement:
    """All rounds of a task."""

    def __init__(self, task: Task, stack: ExitStack) -> None:
        """Connects to the nodes; ``stack`` closes the channels."""
        self._task = task
        self._ids = TokenIds(task.ids)
        self._overlap = Clients(task.nodes, stack)
        self._serial = Clients(task.serial, stack)
        self._runs: list[Run] = []

    def run(self) -> Measured:
        """Warms every way up, picks the rates, then measures round by round.

        Raises:
            CacheLinkError: a node cannot be reached, refused or failed.
        """
        wire_bytes, prefill_s = self._warm_up()
        cells = [(case, ratio) for case in self._task.cases for ratio in self._task.ratios]
        for number in range(self._task.rounds):
            for case, ratio in turned(cells, number):
                rate_bits = int(8 * wire_bytes[case.name] * ratio / prefill_s / _PAYLOAD_SHARE)
                self._cell(number, case, ratio, max(MIN_RATE_BITS, rate_bits))
        return Measured(prefill_s, tuple(self._runs))

    def _warm_up(self) -> tuple[dict[str, int], float]:
        """Payload bytes of each case, and the seconds of a prefill alone."""
        self._set_rate(_WARM_RATE_BITS)
        wire_bytes = {}
        for clients in (self._serial, self._overlap):
            held = clients.sender.prefill(self._ids, deadline_s=_DEADLINE_S).sender_cache_id
            for case in self._task.cases:
                wire_bytes[case.name] = clients.handoff(HeldCache(held), case).wire_bytes
            clients.sender.evict(held)
        times_s = []
        for _ in range(_PREFILLS):
            prefilled = self._overlap.sender.prefill(self._ids, deadline_s=_DEADLINE_S)
            self._overlap.sender.evict(prefilled.sender_cache_id)
            times_s.append(prefilled.phases["prefill"])
        return wire_bytes, statistics.median(times_s)

    def _cell(self, number: int, case: Case, ratio: float, rate_bits: int) -> None:
        """Every way of one case at one rate, in an order that turns with the rounds."""
        self._set_rate(rate_bits)
        ways = (self._alone, self._streamed, self._one_after_another)
        for way in turned(ways, number):
            for name, receipt in way(case).items():
                self._runs.append(Run(number, case.name, ratio, name, rate_bits, rounded(receipt)))
        print(f"round {number + 1}: {case.name}, {ratio:g}", file=sys.stderr, flush=True)

    def _alone(self, case: Case) -> dict[Way, Receipt]:
        """The prefill alone, then the handoff of what it left."""
        sender = self._overlap.sender
        prefilled = sender.prefill(self._ids, deadline_s=_DEADLINE_S)
        try:
            moved = self._overlap.handoff(HeldCache(prefilled.sender_cache_id), case)
        finally:
            sender.evict(prefilled.sender_cache_id)
        return {"prefill": prefilled, "link": moved}

    def _streamed(self, case: Case) -> dict[Way, Receipt]:
        return {"overlap": self._from_nothing(self._overlap, case)}

    def _one_after_another(self, case: Case) -> dict[Way, Receipt]:
        return {"serial": self._from_nothing(self._serial, case)}

    def _from_nothing(self, clients: Clients, case: Case) -> Receipt:
        receipt = clients.handoff(self._ids, case)
        clients.sender.evict(receipt.sender_cache_id)
        if receipt.prefilled_tokens != len(self._task.ids):
            raise InternalError(f"{case.name}: only {receipt.prefilled_tokens} tokens were read")
        return receipt

    def _set_rate(self, rate_bits: int) -> None:
        set_rate(self._task.link, LinkSpec(f"{rate_bits}bit", rate_bits))


def rounded(receipt: Receipt) -> Receipt:
    """The same to the microsecond: result files hold many."""
    line = receipt.timeline
    return replace(
        receipt,
        phases={name: round(seconds, 6) for name, seconds in receipt.phases.items()},
        timeline=Timeline(
            **{
                name: tuple(round(seconds, 6) for seconds in getattr(line, name))
                for name in Timeline.__dataclass_fields__
            }
        ),
    )


def main() -> int:
    """Runs the task on standard input; what was measured, or the error, goes to standard output."""
    die_with_parent()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    said: Measured | Failed
    try:
        with ExitStack() as stack:
            said = Measurement(task, stack).run()
    except CacheLinkError as error:
        said = Failed(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
