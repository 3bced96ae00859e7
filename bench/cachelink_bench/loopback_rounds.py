"""Runs the arms in turn: every round has each of them once, in an order that rotates."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachelink_bench.loopback_arms import Arm
from cachelink_bench.loopback_peer import ReceiverProcess
from cachelink_bench.loopback_receiver import cpu_s
from cachelink_bench.turns import turned
from cachelink_core.errors import ChecksumMismatch


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one arm.

    Attributes:
        wall_s: first payload byte → in place and acknowledged.
        sender_cpu_s: user and system seconds of the sending process.
        receiver_cpu_s: of the receiving one.
    """

    wall_s: float
    sender_cpu_s: float
    receiver_cpu_s: float


Rounds = dict[str, list[Measured]]


def run_rounds(
    arms: Mapping[str, Arm],
    peer: ReceiverProcess,
    rounds: int,
    on_round: Callable[[int], None] = lambda _done: None,
) -> Rounds:
    """Warms every arm up once, then measures.

    Args:
        arms: by key.
        peer: the receiving process.
        rounds: how often each arm is measured.
        on_round: told the number of rounds done.

    Raises:
        ChecksumMismatch: what arrived is not what was sent.
    """
    keys = list(arms)
    results: Rounds = {key: [] for key in keys}
    # A collection before each run then looks at what the runs left, not at all of torch.
    gc.freeze()
    try:
        for key in keys:
            _measure(arms[key], peer)
        for number in range(rounds):
            for key in turned(keys, number):
                results[key].append(_measure(arms[key], peer))
            on_round(number + 1)
    finally:
        gc.unfreeze()
    return results


def _measure(arm: Arm, peer: ReceiverProcess) -> Measured:
    gc.collect()
    peer.ask(do="collect")
    arm.prepare()
    receiver_s: float = peer.ask(do="cpu")["cpu_s"]
    sender_s = cpu_s()
    wall_s = arm.run()
    sender_s = cpu_s() - sender_s
    receiver_s = peer.ask(do="cpu")["cpu_s"] - receiver_s
    arrived = arm.arrived()
    if arrived != arm.expected:
        raise ChecksumMismatch(f"{arm.name}: digest {arrived} arrived, {arm.expected} was sent")
    return Measured(wall_s, sender_s, receiver_s)
