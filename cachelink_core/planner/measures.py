"""What was measured, and what is to be done: the inputs of a prediction.

Rates are in bytes of the native cache a second, so that one handoff's stages compare; only the link's
rate is in bytes as they travel.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cachelink_core.planner.shape import CacheShape


class Prefill(msgspec.Struct, frozen=True):
    """Time to read tokens: ``T(n) = token_s * n + token2_s * n**2``.

    Attributes:
        token_s: seconds a token.
        token2_s: attention's share, which grows with the position; 0 where it was not measured.
    """

    token_s: float
    token2_s: float = 0.0

    def seconds(self, start: int, stop: int) -> float:
        """Seconds for positions ``[start, stop)``."""
        return self.token_s * (stop - start) + self.token2_s * (stop**2 - start**2)


class CodecRates(msgspec.Struct, frozen=True):
    """One codec with its packing, in bytes of the native cache a second.

    Attributes:
        encode_bytes_per_s: encoding, packing and digest at the sender.
        load_bytes_per_s: digest, unpacking and decoding at the receiver, re-rotation included.
        packed_share: bytes on the wire over bytes before packing.
    """

    encode_bytes_per_s: float
    load_bytes_per_s: float
    packed_share: float = 1.0


DEFAULT_RATES: Final[dict[str, CodecRates]] = {
    "native": CodecRates(7.06e9, 14.3e9),
    "native+zstd": CodecRates(0.97e9, 1.96e9, 0.673),
    "bf16": CodecRates(7.06e9, 14.3e9),
    "bf16+zstd": CodecRates(0.97e9, 1.96e9, 0.673),
    "int8": CodecRates(0.80e9, 1.77e9),
    "int8+zstd": CodecRates(0.53e9, 1.08e9, 0.968),
    "int4": CodecRates(0.65e9, 1.28e9),
    "int4+zstd": CodecRates(0.52e9, 1.01e9, 0.932),
}
"""For a codec that a node has not used yet: medians of six texts on one core of an AMD EPYC, packing
included. Source: bench/results/codecs-smollm2.json, ``texts[].gb_per_s`` and ``bytes_sent``."""


class Link(msgspec.Struct, frozen=True):
    """A link between two nodes.

    Attributes:
        bytes_per_s: payload bytes as they travel.
        fixed_s: of a handoff of no bytes: round trips, manifest check, receipt.
        allocate_bytes_per_s: of the destination, before the first byte; None if it was not measured.
    """

    bytes_per_s: float
    fixed_s: float = 0.0
    allocate_bytes_per_s: float | None = None


class Queue(msgspec.Struct, frozen=True):
    """Work ahead of ours: counted as if it were served first, which is the longest that it can take.

    Attributes:
        waiting: pieces of work under way or waiting.
        mean_s: of one.
    """

    waiting: int = 0
    mean_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until it is done."""
        return self.waiting * self.mean_s


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What two nodes and the link between them measured.

    Attributes:
        link: between them.
        codecs: rates by codec name; ``DEFAULT_RATES`` stand in for what is missing.
        receiver_prefill: of the receiver's own model; None if it has read nothing yet.
        sender_prefill: likewise.
        map_token_s: translation at the receiver, seconds a token; None if not measured.
        query_s: one query's forward at the receiver.
        decode_token_s: one generated token at the receiver.
        sender_queue: work before ours at the sender's device.
        link_queue: transfers before ours on the link.
        receiver_queue: answers before ours at the receiver's device.
        assumed: names of values that stand in for measured ones, for people.
    """

    link: Link
    codecs: dict[str, CodecRates] = {}
    receiver_prefill: Prefill | None = None
    sender_prefill: Prefill | None = None
    map_token_s: float | None = None
    query_s: float = 0.0
    decode_token_s: float = 0.0
    sender_queue: Queue = Queue()
    link_queue: Queue = Queue()
    receiver_queue: Queue = Queue()
    assumed: tuple[str, ...] = ()

    def rates(self, codec: str) -> CodecRates:
        """Of one codec, measured or assumed."""
        return self.codecs.get(codec) or DEFAULT_RATES[codec]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix to be made known.

    Attributes:
        shape: of the sender's cache.
        tokens: of the prefix.
        held_tokens: of these, in a cache of the sender already.
        overlap: send each block once it is ready; False runs stage after stage, as the seed's
            columns and the published break-even rates do.
        stream: begin to send before the prefill has ended; it needs ``overlap``.
        questions: how many will be asked about it.
        answer_tokens: generated for each.
    """

    shape: CacheShape
    tokens: int
    held_tokens: int = 0
    overlap: bool = True
    stream: bool = True
    questions: int = 1
    answer_tokens: int = 32
