"""Names made of content: the keys of blocks and the id of a cache.

A name is a digest over what the cache was made from, so the same handoff sent twice is the same
cache, on any machine, under any hash seed. A name is no secret and no permission: a cache is found
by tenant and name.
"""

from __future__ import annotations

from blake3 import blake3

from cachelink_core.codec_spec import CodecSpec
from cachelink_core.identity import ModelIdentity, canonical_bytes

DEFAULT_TENANT = "default"
"""The tenant of every caller of a daemon that asks for no token."""


def block_keys(identity: ModelIdentity, block_tokens: int, token_ids: bytes) -> tuple[bytes, ...]:
    """One chained BLAKE3 key a block.

    ``key_i = BLAKE3(key_{i-1} ‖ token ids of block i)``; the first link holds the sender's identity
    and ``block_tokens``, so that equal keys mean equal tokens in equal blocks of an equal model.

    Args:
        identity: of the model that computed the cache.
        block_tokens: tokens of a full block.
        token_ids: the prefix as little-endian u32.
    """
    key = blake3(canonical_bytes([identity.digest(), block_tokens])).digest()
    keys: list[bytes] = []
    step = 4 * block_tokens
    for at in range(0, len(token_ids), step):
        key = blake3(key + token_ids[at : at + step]).digest()
        keys.append(key)
    return tuple(keys)


def cache_id(
    *,
    tenant: str,
    receiver: ModelIdentity,
    sender: ModelIdentity,
    block_tokens: int,
    token_ids: bytes,
    codec: CodecSpec,
    mapper: str,
) -> str:
    """The name of an installed cache, in hexadecimal.

    The packing is no part of it: it changes the bytes on the wire and nothing else.

    Args:
        tenant: authenticated, never the peer's claim.
        receiver: the model that will read the cache.
        sender: the model that computed it.
        block_tokens: part of the name because the prefill schedule decides the bits.
        token_ids: the prefix as little-endian u32.
        codec: with its parameters.
        mapper: digest of the mapper, or ``none``.
    """
    keys = block_keys(sender, block_tokens, token_ids)
    parts = [
        tenant,
        receiver.digest(),
        sender.digest(),
        keys[-1] if keys else b"",
        block_tokens,
        len(token_ids) // 4,
        codec,
        mapper,
    ]
    return blake3(canonical_bytes(parts)).hexdigest()
