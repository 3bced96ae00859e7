"""The stages of one handoff, block by block, as spans of time from its receipt.

A receipt says when each block was through each stage. A span ends then, and begins when the stage
could take the block: once the block was prefilled, and once the stage was done with the block before.
So a span holds the stage's waits as well: of encode and send for the link, of verify for the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from cachelink_core.errors import InvalidRequest
from cachelink_core.rpc.types import Receipt, Timeline

Stage = Literal["prefill", "encode", "send", "verify", "install"]
Side = Literal["sender", "receiver"]

STAGES: Final[dict[Side, tuple[Stage, ...]]] = {
    "sender": ("prefill", "encode", "send"),
    "receiver": ("verify", "install"),
}
"""In the order in which a block passes them. Each side has its own clock."""


@dataclass(frozen=True, slots=True)
class Span:
    """One block in one stage; seconds from the reply to Reserve on the clock of the stage's side.

    Attributes:
        block: its number.
        begin_s: may be negative: a prefill can begin before Reserve.
        end_s: not before ``begin_s``.
    """

    block: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Spans:
    """All spans of a handoff.

    Attributes:
        stages: one span a block each, ordered.
        receipt: from the last frame sent to the receipt's arrival, sender's clock.
    """

    stages: dict[Stage, tuple[Span, ...]]
    receipt: Span

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.stages["prefill"])

    @property
    def first_s(self) -> float:
        """When the earliest span begins, at most 0."""
        return min(0.0, self.stages["prefill"][0].begin_s)

    @property
    def last_s(self) -> float:
        """When the latest span of either side ends."""
        ends = [spans[-1].end_s for spans in self.stages.values()]
        return max(*ends, self.receipt.end_s)


def make_spans(receipt: Receipt) -> Spans:
    """Reads the spans off a receipt.

    Raises:
        InvalidRequest: nothing was sent, or the timeline is not that of one whole push.
    """
    line = receipt.timeline
    blocks = len(line.prefilled_at_s)
    if not blocks:
        raise InvalidRequest("receipt.timeline is empty: nothing was sent for it")
    _check(line, blocks)
    if "push" not in receipt.phases:
        raise InvalidRequest("receipt.phases has no 'push': the sender is an older one")
    ready = line.prefilled_at_s
    begun_s = ready[-1] - receipt.phases.get("prefill", 0.0)
    received_s = max(receipt.phases["push"], line.sent_at_s[-1])
    return Spans(
        stages={
            "prefill": _chained(ready, begun_s, ()),
            "encode": _chained(line.encoded_at_s, 0.0, ready),
            "send": _chained(line.sent_at_s, 0.0, ready),
            "verify": _chained(line.verified_at_s, 0.0, (0.0, *line.installed_at_s[:-1])),
            "install": _chained(line.installed_at_s, 0.0, line.verified_at_s),
        },
        receipt=Span(blocks - 1, line.sent_at_s[-1], received_s),
    )


def _chained(ends: Sequence[float], begun_s: float, could: Sequence[float]) -> tuple[Span, ...]:
    """Spans that end as given and begin when the block before was through and the block was there.

    Args:
        ends: of each block.
        begun_s: when the stage could begin at all.
        could: when each block came to the stage; empty if it always was there.
    """
    begins = [max(begun_s, *could[:1]) if could else begun_s]
    begins += [
        max(before, could[block]) if could else before
        for block, before in enumerate(ends[:-1], start=1)
    ]
    # A block that was there before its stage began takes no time in it.
    return tuple(
        Span(block, min(begin, end), end)
        for block, (begin, end) in enumerate(zip(begins, ends, strict=True))
    )


def _check(line: Timeline, blocks: int) -> None:
    for name in Timeline.__dataclass_fields__:
        ends: tuple[float, ...] = getattr(line, name)
        if len(ends) != blocks:
            raise InvalidRequest(
                f"receipt.timeline.{name} has {len(ends)} blocks, prefilled_at_s has {blocks}: "
                "a picture needs a handoff that sent them all"
            )
        if any(after < before for before, after in pairwise(ends)):
            raise InvalidRequest(f"receipt.timeline.{name} goes back in time")
