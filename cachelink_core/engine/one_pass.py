"""Keys that are turned and quantized in one pass, where the codec's kernels do both.

The usual way is two passes: the engine strips the rotation into a float32 copy, which the codec
quantizes, and the other way round at the receiver. Both functions here say whether there was a
shorter way; if not, the caller takes the usual one.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from cachelink_core.codecs.affine import AffineCodec
from cachelink_core.codecs.base import TensorCodec
from cachelink_core.engine.base import Engine
from cachelink_core.layout import TensorSlice


def encode_keys(
    engine: Engine, codec: TensorCodec, piece: TensorSlice, keys: Tensor
) -> list[memoryview] | None:
    """Encodes cached keys in content space.

    Args:
        engine: of the keys' model.
        codec: of the handoff.
        piece: which keys.
        keys: ``[H, T, D]`` as they are cached.

    Returns:
        The parts, or None if it takes two passes.

    Raises:
        InvalidRequest: as ``AffineCodec.encode``.
    """
    if not isinstance(codec, AffineCodec) or not codec.compiled:
        return None
    angles = engine.half_angles(piece.layer, piece.start, piece.stop, inverse=True)
    if angles is None or not codec.turns(keys, piece.start, angles[0].shape[1], encode=True):
        return None
    return codec.encode(keys, "K", piece.start, angles)


def decode_keys(
    engine: Engine, codec: TensorCodec, piece: TensorSlice, payload: memoryview, out: Tensor
) -> bool:
    """Decodes content-space keys and applies the rotation.

    Args:
        engine: of the receiver's model.
        codec: of the handoff.
        piece: which keys.
        payload: of the slice.
        out: ``[H, T, D]`` of the cache.

    Returns:
        Whether it is done; False if it takes two passes.

    Raises:
        CorruptChunk: as ``AffineCodec.decode``.
    """
    if not isinstance(codec, AffineCodec) or not codec.compiled:
        return False
    angles = engine.half_angles(piece.layer, piece.start, piece.stop, inverse=False)
    if angles is None or not codec.turns(out, piece.start, angles[0].shape[1], encode=False):
        return False
    codec.decode(payload, "K", piece.start, out, angles)
    return True
