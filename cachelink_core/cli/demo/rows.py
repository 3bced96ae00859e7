"""What one arm of the demonstration gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachelink_core.rpc.client import Final, Receipt
from cachelink_core.rpc.transfer_types import PushReceipt


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as it arrived.

    Attributes:
        token_ids: all of them.
        text: all of it.
        answer: the text up to the first end of sequence.
        final: its account.
    """

    token_ids: tuple[int, ...]
    text: str
    answer: str
    final: Final


@dataclass(frozen=True, slots=True)
class Row:
    """One arm. A time that the arm does not have is None.

    Attributes:
        arm: its name.
        tokens: of the prefix.
        wire_bytes: payload bytes sent; 0 when the text travels.
        bf16_bytes: of the same cache in bfloat16, unpacked.
        prefill_s: reading the document, by whichever node did, on its clock.
        send_s: first frame handed over to receipt, less the receiver's tail; the sender's clock.
        load_s: exposed, the receiver's clock.
        load_busy_s: verifying and decoding, most of it hidden behind the stream.
        install_s: the receiver's clock.
        round_trip_s: this client's clock, from the request to the last token.
        cold: the round trip includes the prefill.
        said: the answer.
        receipt: of the handoff, if there was one.
    """

    arm: str
    tokens: int
    wire_bytes: int
    bf16_bytes: int
    prefill_s: float | None
    send_s: float | None
    load_s: float | None
    load_busy_s: float | None
    install_s: float | None
    round_trip_s: float
    cold: bool
    said: Said
    receipt: Receipt | PushReceipt | None = None

    @property
    def path(self) -> str:
        """What the answer was made from."""
        return self.said.final.path

    @property
    def query_prefill_s(self) -> float:
        """The question's forward, on the receiver's clock."""
        return self.said.final.phases["query_prefill"]

    @property
    def first_token_s(self) -> float:
        """Request of the answer to its first token, on the receiver's clock."""
        return self.said.final.first_token_s

    @property
    def ratio(self) -> float:
        """Wire bytes as a share of the bfloat16 cache."""
        return self.wire_bytes / self.bf16_bytes if self.bf16_bytes else 0.0

    def same_tokens(self, other: Row) -> int:
        """How many of the first tokens are those of another row."""
        return common_prefix(self.said.token_ids, other.said.token_ids)

    def equals(self, other: Row) -> bool:
        """Whether all tokens are those of another row."""
        return self.said.token_ids == other.said.token_ids

    def document(self, reference: Row) -> dict[str, object]:
        """The row for a program."""
        return {
            "arm": self.arm,
            "tokens": self.tokens,
            "wire_bytes": self.wire_bytes,
            "ratio_to_bf16": self.ratio,
            "prefill_s": self.prefill_s,
            "send_s": self.send_s,
            "load_s": self.load_s,
            "load_busy_s": self.load_busy_s,
            "install_s": self.install_s,
            "query_prefill_s": self.query_prefill_s,
            "first_token_s": self.first_token_s,
            "round_trip_s": self.round_trip_s,
            "cold": self.cold,
            "path": self.path,
            "equals_re_read": self.equals(reference),
            "same_first_tokens": self.same_tokens(reference),
            "answer": self.said.answer,
            "text": self.said.text,
            "token_ids": self.said.token_ids,
            "final": self.said.final,
            "receipt": self.receipt,
        }


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning of two sequences."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
