"""What the tests of staged copies share, on a CPU and on a device."""

from __future__ import annotations

import msgspec

from cachelink_core.codec_spec import CODECS, NO_PACKING
from cachelink_core.engine.chunks import ChunkEncoder
from cachelink_core.engine.offer import make_header
from cachelink_core.layout import Run


def one_run_a_tensor(engine, ids, block_tokens, codec="native", packing=NO_PACKING, **kwargs):
    """A header by which a block takes several chunks."""
    header = make_header(
        engine, ids, CODECS[codec], packing, sender_epoch="e", block_tokens=block_tokens, **kwargs
    )
    tensors = 2 * len(header.identity.layers)
    return msgspec.structs.replace(
        header, runs=tuple(Run(i, 1, 0, header.block_tokens) for i in range(tensors))
    )


def wires(engine, header, cache):
    """The wire bytes of every chunk."""
    encoder = ChunkEncoder(engine, header, cache)
    return {i: b"".join(encoder.encode(*i)) for i in header.layout.chunks()}
