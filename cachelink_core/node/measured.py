"""What a node measures while it works: the planner's inputs.

Each reading is a ratio of two decayed sums (bytes over seconds, seconds over tokens), so that a large
transfer counts more than a small one and the latest count most. A small sample hardly decays what larger
ones said. Times include what they really waited for; on a busy node they say what a busy node takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from cachelink_core.planner import Measurement, readings

_WEIGHT: Final = 0.3
"""Share of the latest sample of usual size: about the last five samples count."""

_QUEUE_SAMPLE: Final = 1.0
"""Weight of a sample that is a mere duration."""


@dataclass
class _Ratio:
    """Numerator over denominator, each a decayed sum."""

    numerator: float = 0.0
    denominator: float = 0.0
    weight: float = 0.0
    samples: int = 0

    def add(self, numerator: float, denominator: float, weight: float) -> None:
        usual = self.weight * _WEIGHT
        share = _WEIGHT * min(1.0, weight / usual) if usual else 0.0
        self.numerator += numerator - share * self.numerator
        self.denominator += denominator - share * self.denominator
        self.weight += weight - share * self.weight
        self.samples += 1

    @property
    def value(self) -> float:
        return self.numerator / self.denominator


@dataclass
class _Slope:
    """Least squares of ``seconds = a * tokens + b * (stop**2 - start**2)`` over blocks, decayed."""

    tt: float = 0.0
    tq: float = 0.0
    qq: float = 0.0
    ts: float = 0.0
    qs: float = 0.0
    samples: int = 0

    def add(self, start: int, stop: int, seconds: float) -> None:
        # 0.95: a prefill has many blocks; about the last twenty count.
        tokens, squares = float(stop - start), float(stop**2 - start**2)
        self.tt = 0.95 * self.tt + tokens * tokens
        self.tq = 0.95 * self.tq + tokens * squares
        self.qq = 0.95 * self.qq + squares * squares
        self.ts = 0.95 * self.ts + tokens * seconds
        self.qs = 0.95 * self.qs + squares * seconds
        self.samples += 1

    @property
    def coefficients(self) -> tuple[float, float]:
        """(a, b); b is 0 where the blocks do not tell the two apart, or noise makes one negative."""
        determinant = self.tt * self.qq - self.tq**2
        if determinant > 1e-6 * self.tt * self.qq:
            a = (self.ts * self.qq - self.qs * self.tq) / determinant
            b = (self.qs * self.tt - self.ts * self.tq) / determinant
            if a > 0.0 and b > 0.0:
                return a, b
        return self.ts / self.tt, 0.0


class BlockClock:
    """Times the blocks of one prefill: called with a block's index when it has been read.

    Attributes:
        blocks: (start, stop, seconds) of each block so far, in tokens.
    """

    def __init__(self, held: int, tokens: int, block_tokens: int) -> None:
        """Starts the clock.

        Args:
            held: tokens that need not be read.
            tokens: of the prefix.
            block_tokens: of a full block.
        """
        self.blocks: list[tuple[int, int, float]] = []
        self._held = held
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._last_s = time.monotonic()

    def __call__(self, block: int) -> None:
        """Notes the end of a block."""
        now = time.monotonic()
        start = max(self._held, block * self._block_tokens)
        stop = min((block + 1) * self._block_tokens, self._tokens)
        self.blocks.append((start, stop, now - self._last_s))
        self._last_s = now


@dataclass(frozen=True, slots=True)
class SentSample:
    """One handoff as its sender saw it. Times are seconds of the sender's clock.

    Attributes:
        codec: ``int4+zstd`` and the like.
        tokens: of the prefix.
        native_bytes: of the tokens that were sent, in the model's dtype.
        raw_bytes: before packing.
        wire_bytes: as sent.
        encode_s: encoding, packing, digests.
        link_s: the least that the link can have taken: from the first frame to the receipt, without
            the receiver's own tail and without the waits for frames to send.
        fixed_s: Reserve, without allocation.
        allocate_s: at the receiver, on its clock.
        load_s: verifying, decoding and re-rotating at the receiver, on its clock.
        map_s: translating there; 0 for a cache of the same model.
        total_s: from the first frame to the receipt.
        link_most_s: the most that it can have taken: ``link_s`` with those waits, during which it may
            still have carried what was sent before.
    """

    codec: str
    tokens: int
    native_bytes: int
    raw_bytes: int
    wire_bytes: int
    encode_s: float
    link_s: float
    fixed_s: float
    allocate_s: float
    load_s: float
    map_s: float
    total_s: float
    link_most_s: float = 0.0


@dataclass
class Measured:
    """The readings of one node. Safe for threads."""

    _ratios: dict[str, _Ratio] = field(default_factory=dict)
    _slope: _Slope = field(default_factory=_Slope)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prefilled(self, blocks: Iterable[tuple[int, int, float]]) -> None:
        """Notes the blocks of one prefill by this node's model: (start, stop, seconds)."""
        total_s = 0.0
        with self._lock:
            for start, stop, seconds in blocks:
                if stop > start and seconds > 0.0:
                    self._slope.add(start, stop, seconds)
                    total_s += seconds
        if total_s:
            self._note(readings.PREFILL, total_s, 1.0, _QUEUE_SAMPLE)

    def answered(self, *, prefix_s: float, query_s: float, decode_s: float, generated: int) -> None:
        """Notes an answer: reading its prefix (if it did), its query, and its tokens."""
        self._note(readings.QUERY, query_s, 1.0, _QUEUE_SAMPLE)
        self._note(readings.ANSWER, prefix_s + query_s + decode_s, 1.0, _QUEUE_SAMPLE)
        if generated > 1:
            self._note(readings.DECODE_TOKEN, decode_s, generated - 1, generated - 1)

    def installed(
        self, codec: str, *, tokens: int, native_bytes: int, load_s: float, map_s: float
    ) -> None:
        """Notes a cache that arrived here; ``map_s`` is 0 for one of the same model."""
        self._note(f"load:{codec}", native_bytes, load_s, native_bytes)
        if map_s > 0.0:
            self._note(readings.MAP_TOKEN, map_s, tokens, tokens)

    def sent(self, peer: str, sample: SentSample) -> None:
        """Notes a handoff to the receiver ``peer``."""
        weight = sample.native_bytes
        self._note(f"encode:{sample.codec}", sample.native_bytes, sample.encode_s, weight)
        self._note(f"packed:{sample.codec}", sample.wire_bytes, sample.raw_bytes, weight)
        self._note_link(f"{peer}/{readings.LINK}", sample)
        self._note(f"{peer}/{readings.FIXED}", sample.fixed_s, 1.0, _QUEUE_SAMPLE)
        self._note(f"{peer}/{readings.TRANSFER}", sample.total_s, 1.0, _QUEUE_SAMPLE)
        self._note(f"{peer}/{readings.ALLOCATE}", sample.native_bytes, sample.allocate_s, weight)
        self._note(f"{peer}/load:{sample.codec}", sample.native_bytes, sample.load_s, weight)
        if sample.map_s > 0.0:
            name = f"{peer}/{readings.MAP_TOKEN}"
            self._note(name, sample.map_s, sample.tokens, sample.tokens)

    def _note_link(self, name: str, sample: SentSample) -> None:
        """Notes a link's rate as far as the handoff tells it.

        A handoff that waited for its encoder bounds the time from both sides only. What is known
        already stays if it lies between; else the nearer bound counts. A socket's buffer makes the lower
        bound useless for small handoffs: it takes their last megabytes at once.
        """
        most_s = max(sample.link_s, sample.link_most_s)
        with self._lock:
            known = self._ratios.get(name)
            expected_s = sample.wire_bytes / known.value if known is not None else most_s
        seconds = min(max(expected_s, sample.link_s), most_s)
        if known is None or seconds != expected_s:
            self._note(name, sample.wire_bytes, seconds, sample.wire_bytes)

    def snapshot(self) -> tuple[Measurement, ...]:
        """Every reading as of now, by name."""
        with self._lock:
            found = [
                Measurement(name, ratio.value, readings.unit_of(name), ratio.samples)
                for name, ratio in self._ratios.items()
            ]
            if self._slope.samples:
                count = self._slope.samples
                for name, value in zip(
                    (readings.PREFILL_TOKEN, readings.PREFILL_TOKEN2),
                    self._slope.coefficients,
                    strict=True,
                ):
                    found.append(Measurement(name, value, readings.unit_of(name), count))
        return tuple(sorted(found, key=lambda reading: reading.name))

    def _note(self, name: str, numerator: float, denominator: float, weight: float) -> None:
        """Adds a sample; what took no measurable time, or moved nothing, says nothing."""
        if denominator <= 0.0 or weight <= 0.0:
            return
        with self._lock:
            self._ratios.setdefault(name, _Ratio()).add(numerator, denominator, weight)
