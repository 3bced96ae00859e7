"""One handoff between two fresh daemons, and what it took of memory on both sides."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import msgspec

from cachelink_bench.memory.cases import Case, Size
from cachelink_bench.memory.models import Models
from cachelink_bench.memory.process_memory import ProcessMemory
from cachelink_core.cli.demo.daemons import RECEIVER_NAME, two_nodes
from cachelink_core.errors import InternalError
from cachelink_core.rpc.client import Receipt, ReceiverClient, SenderClient, TokenIds

_DEADLINE_S = 600.0
_FIRST_ID, _LAST_ID = 4, 276
"""Of the test tokenizer: what is no special token."""


class Side(msgspec.Struct, frozen=True):
    """Memory of one daemon.

    Attributes:
        model_bytes: resident when it was ready: model, libraries, all that the self-check needed.
        peak_bytes: the most that was resident during the handoff.
        cache_bytes: of its cache, room for query and answer included, as the daemon lists it.
    """

    model_bytes: int
    peak_bytes: int
    cache_bytes: int

    @property
    def above_bytes(self) -> int:
        """What it took at its peak beside model and cache."""
        return self.peak_bytes - self.model_bytes - self.cache_bytes


class Sample(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        case: its name.
        sender: the sender's memory, from an empty store: it prefills meanwhile.
        receiver: the receiver's.
    """

    case: str
    sender: Side
    receiver: Side


def measure(case: Case, size: Size, models: Models, threads: int) -> Sample:
    """Starts two daemons, hands one cache over while it is prefilled, and ends them.

    Args:
        case: what is measured.
        size: of the cache.
        models: on disk.
        threads: CPU threads of each daemon.

    Raises:
        CacheLinkError: a daemon does not start, refuses or fails.
    """
    receiver_options = ["--model.name", str(models.sender)]
    if case.mapped:
        assert models.receiver is not None, "a mapped case has a receiver of its own"
        assert models.mapper is not None, "and a mapper"
        receiver_options = ["--model.name", str(models.receiver), "--allow-failed-gate"]
        receiver_options += ["--mappers", json.dumps([str(models.mapper)])]
    sender_options = ["--model.name", str(models.sender), "--data-planes", json.dumps([case.plane])]
    sender_options += ["--block-tokens", str(size.block_tokens)]
    common = ["--model.device", "cpu", "--model.threads", str(threads), "--log.level", "error"]
    with (
        two_nodes(
            common, sender_options=sender_options, receiver_options=receiver_options
        ) as nodes,
        SenderClient(nodes.sender_address) as sender,
        ReceiverClient(nodes.receiver_address) as receiver,
    ):
        memories = ProcessMemory(nodes.sender.pid), ProcessMemory(nodes.receiver.pid)
        before = [memory.resident_bytes() for memory in memories]
        for memory in memories:
            memory.reset_peak()
        receipt = sender.handoff(
            TokenIds(prefix_ids(size.tokens)),
            RECEIVER_NAME,
            codec=case.codec,
            mapper="any" if case.mapped else "",
            deadline_s=_DEADLINE_S,
        )
        peaks = [memory.peak_bytes() for memory in memories]
        _check(case, size, receipt)
        caches = [_only_cache(sender), _only_cache(receiver)]
    sides = [Side(*values) for values in zip(before, peaks, caches, strict=True)]
    return Sample(case.name, *sides)


def prefix_ids(tokens: int) -> tuple[int, ...]:
    """A prefix; the same one at every call."""
    drawn = random.Random(0)
    return tuple(drawn.randint(_FIRST_ID, _LAST_ID) for _ in range(tokens))


def _only_cache(client: SenderClient | ReceiverClient) -> int:
    held: Sequence[int] = [cache.bytes for cache in client.caches().caches]
    if len(held) != 1:
        raise InternalError(f"{client.address} holds {len(held)} caches, not 1")
    return held[0]


def _check(case: Case, size: Size, receipt: Receipt) -> None:
    found = receipt.data_plane, receipt.tokens, receipt.native_bytes
    if found != (case.plane, size.tokens, size.cache_bytes):
        raise InternalError(f"{case.name}: plane, tokens and native bytes are {found}")


__all__ = ["Sample", "Side", "measure", "prefix_ids"]
