"""What a handoff's parts cost on one core, and which of them limits the rate.

The parts run alone, in one thread, over the same chunks as the handoff. What gRPC costs is taken
from the baseline's CPU time in the same run, because it works in threads of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachelink_bench.capture import HEADROOM_TOKENS
from cachelink_bench.handoff_ends import Subject
from cachelink_bench.physics import best_s
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.handoff.session import chunk_digest


@dataclass(frozen=True, slots=True)
class Parts:
    """Thread seconds for all chunks of one handoff.

    Attributes:
        encode_join_s: tensors to views or codes, joined to messages.
        digest_s: of every chunk; each side pays it once.
        install_s: chunks decoded into the preallocated cache.
        copy_s: the chunks' bytes copied once, as any transport must at each end.
    """

    encode_join_s: float
    digest_s: float
    install_s: float
    copy_s: float

    def rates(self, native_bytes: int) -> dict[str, float]:
        """GB of the cache's own bytes a second on one core, by part."""
        return {
            "encode_join": native_bytes / self.encode_join_s / 1e9,
            "digest": native_bytes / self.digest_s / 1e9,
            "install": native_bytes / self.install_s / 1e9,
        }


def measure_parts(subject: Subject, codec: str) -> Parts:
    """Times each part alone."""
    header = subject.header(codec)
    chunks = tuple(header.layout.chunks())
    cache = subject.engine.open_cache(header.tokens, HEADROOM_TOKENS, whole=False)
    encoder = ChunkEncoder(subject.engine, header, subject.held.cache)
    installer = ChunkInstaller(subject.engine, header, cache)
    wires = [b"".join(encoder.encode(*index)) for index in chunks]
    views = [memoryview(wire) for wire in wires]

    def encode_join() -> None:
        for index in chunks:
            b"".join(encoder.encode(*index))

    def digest() -> None:
        for index, view in zip(chunks, views, strict=True):
            chunk_digest(*index, view)

    def install() -> None:
        for index, view in zip(chunks, views, strict=True):
            installer.install(*index, view)
        installer.finish()

    target = bytearray(max(map(len, wires)))

    def copy() -> None:
        for wire in wires:
            target[: len(wire)] = wire

    return Parts(best_s(encode_join), best_s(digest), best_s(install), best_s(copy))


@dataclass(frozen=True, slots=True)
class Side:
    """One process in one arm, medians.

    Attributes:
        cpu_s: of the process, all threads.
        grpc_s: what the baseline spends in the same place, its one copy included.
        digest_s: of the chunks.
        tensor_s: encoding beyond the copy, or installing beyond it.
    """

    cpu_s: float
    grpc_s: float
    digest_s: float
    tensor_s: float

    def text(self, name: str, wall_s: float) -> str:
        """One clause: how busy the side is, and with what."""
        rest_s = self.cpu_s - self.grpc_s - self.digest_s - self.tensor_s
        shares = {
            "gRPC and its copy": self.grpc_s,
            "tensors": self.tensor_s,
            "digest": self.digest_s,
            "threads, session and Python": rest_s,
        }
        listed = ", ".join(f"{what} {100 * s / self.cpu_s:.0f} %" for what, s in shares.items())
        return f"the {name} is busy {100 * self.cpu_s / wall_s:.0f} % of the time ({listed})"
