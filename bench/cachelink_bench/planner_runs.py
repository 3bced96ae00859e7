"""The measuring half of the planner's benchmark: a client beside the sender, without torch."""

from __future__ import annotations

import sys
import time
from typing import Final

import msgspec

from cachelink_bench.turns import turned
from cachelink_core.errors import CacheLinkError
from cachelink_core.planner import Measurement, Plan
from cachelink_core.rpc.client import (
    HeldCache,
    ReceiverClient,
    Sampling,
    SenderClient,
    TokenIds,
)

TEXT: Final = "text"
AUTO: Final = "auto"
WARM_UP_TOKENS: Final = 300
"""More than one block."""

WARM_UP_READS: Final = 4

_QUERY: Final = TokenIds(tuple(range(500, 516)))
_ONE: Final = Sampling(max_new_tokens=2, ignore_eos=True)
_DEADLINE_S: Final = 1800.0


class Task(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        sender: address.
        receiver: address.
        receiver_name: in the sender's list.
        ids: of a text; prefixes are cut from it.
        lengths: tokens of the prefixes.
        codecs: by which a cache is moved: those among which ``auto`` chooses.
        repeats: rounds of each.
    """

    sender: str
    receiver: str
    receiver_name: str
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    codecs: tuple[str, ...]
    repeats: int


class Run(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        way: a codec, ``text``, or ``auto``.
        first_token_s: from the request to the first token, client's clock.
        ready_s: of this, until the handoff's receipt; 0 for text.
        plan: of an ``auto`` run, without its predictions: they follow from the readings.
    """

    way: str
    first_token_s: float
    ready_s: float
    plan: Plan | None = None


class Case(msgspec.Struct, frozen=True):
    """One prefix length on one link.

    Attributes:
        tokens: of the prefix, all held by the sender.
        sender: its readings before the runs.
        receiver: likewise.
        runs: in the order in which they were made.
    """

    tokens: int
    sender: tuple[Measurement, ...]
    receiver: tuple[Measurement, ...]
    runs: tuple[Run, ...]


class Clients:
    """Both nodes, and the runs on them."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._sender = SenderClient(task.sender)
        self._receiver = ReceiverClient(task.receiver)

    def cases(self) -> tuple[Case, ...]:
        """Everything, after a warm-up of every way; the first reading of a text says little."""
        warm = self._task.ids[:WARM_UP_TOKENS]
        for way in (*self._task.codecs, *[TEXT] * WARM_UP_READS):
            self._run(way, self._held(warm), warm)
        return tuple(self._case(tokens) for tokens in self._task.lengths)

    def _case(self, tokens: int) -> Case:
        readings = [client.ping().measurements for client in (self._sender, self._receiver)]
        runs: list[Run] = []
        ways = (*self._task.codecs, TEXT, AUTO)
        for repeat in range(self._task.repeats):
            # Another cut each time, so that nothing is known from before.
            ids = self._task.ids[repeat + 1 : repeat + 1 + tokens]
            held = self._held(ids)
            for way in turned(ways, repeat):
                run = self._run(way, held, ids)
                print(f"  {tokens} {run.way}: {run.first_token_s:.3f} s", file=sys.stderr)
                runs.append(run)
            self._sender.evict(held)
        return Case(tokens, readings[0], readings[1], tuple(runs))

    def _held(self, ids: tuple[int, ...]) -> str:
        return self._sender.prefill(TokenIds(ids), deadline_s=_DEADLINE_S).cache_id

    def _run(self, way: str, held: str, ids: tuple[int, ...]) -> Run:
        began = time.monotonic()
        if way == TEXT:
            return Run(way, self._first_token_s(TokenIds(ids), began), 0.0)
        receipt = self._sender.handoff(
            HeldCache(held), self._task.receiver_name, codec=way, deadline_s=_DEADLINE_S
        )
        if receipt.recommendation == "re_read":
            return Run(way, self._first_token_s(TokenIds(ids), began), 0.0, _short(receipt.plan))
        ready_s = time.monotonic() - began
        first_s = self._first_token_s(HeldCache(receipt.cache_id), began)
        self._receiver.evict(receipt.cache_id)
        return Run(way, first_s, ready_s, _short(receipt.plan))

    def _first_token_s(self, context: TokenIds | HeldCache, began: float) -> float:
        answer = self._receiver.answer(context, _QUERY, sampling=_ONE, deadline_s=_DEADLINE_S)
        next(iter(answer))
        first_s = time.monotonic() - began
        answer.text()
        return first_s


def _short(plan: Plan | None) -> Plan | None:
    return plan and msgspec.structs.replace(plan, predictions=())


def main() -> int:
    """Runs the task on standard input; cases go to standard output.

    Returns:
        0; 1 for an error, which is one line on standard error.
    """
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    try:
        cases = Clients(task).cases()
    except CacheLinkError as error:
        print(f"{error.reason}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(cases))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
