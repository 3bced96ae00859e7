"""The self-check behind readiness: a tiny handoff through the real code path, in this process."""

from __future__ import annotations

import time

import torch

from cachelink_core import limits
from cachelink_core.codec_spec import CODECS, PACKINGS
from cachelink_core.engine.base import Engine, Finish, Sampling
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.errors import InternalError
from cachelink_core.handoff import HandoffSession, State, events
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import Header, SenderTimings, decode_header, encode_header

_BLOCK_TOKENS = limits.MIN_BLOCK_TOKENS
_PREFIX_TOKENS = 2 * _BLOCK_TOKENS + 1
_ANSWER_TOKENS = 4


def self_check(engine: Engine, *, codecs: tuple[str, ...] = ("native", "int8", "int4")) -> float:
    """Hands a short cache over to itself and answers from it.

    A native cache must arrive bit for bit and give the tokens that the sender's own cache gives;
    quantized ones must decode and give tokens at all.

    Args:
        engine: with its model loaded.
        codecs: ids of the codecs to try; each is packed with zstd.

    Returns:
        Seconds it took.

    Raises:
        InternalError: what was handed over is not what was sent.
        CacheLinkError: whatever the code path raised.
    """
    began = time.monotonic()
    tokens = min(_PREFIX_TOKENS, engine.identity.max_positions // 2)
    ids = [(1 + 7 * i) % min(200, engine.vocabulary_size) for i in range(tokens)]
    own = engine.open_cache(len(ids), _ANSWER_TOKENS + 1, whole=True)
    engine.prefill(own, ids, _BLOCK_TOKENS)
    own.use_window()
    received = {name: _hand_over(engine, ids, own, name) for name in codecs}
    expected = _answer(engine, own, ids)
    for name, cache in received.items():
        answered = _answer(engine, cache, ids)
        if name == "native" and answered != expected:
            raise InternalError(f"self-check: {name} cache answers {answered}, own {expected}")
        if len(answered) != len(expected):
            raise InternalError(f"self-check: {name} cache gives {len(answered)} tokens")
    return time.monotonic() - began


def _hand_over(engine: Engine, ids: list[int], own: PrefixCache, name: str) -> PrefixCache:
    header = decode_header(
        encode_header(
            make_header(
                engine,
                ids,
                CODECS[name],
                PACKINGS["zstd"],
                sender_epoch=mint_id(),
                block_tokens=_BLOCK_TOKENS,
            )
        )
    )
    cache = engine.open_cache(len(ids), _ANSWER_TOKENS + 1, whole=False)
    _run_session(engine, header, own, cache)
    if name == "native":
        _check_equal(header, own, cache)
    return cache


def _run_session(engine: Engine, header: Header, own: PrefixCache, cache: PrefixCache) -> None:
    epoch = mint_id()
    ours = HandoffSession(header, epoch, 0.0)
    theirs = HandoffSession(header, epoch, 0.0)
    encoder = ChunkEncoder(engine, header, own)
    installer = ChunkInstaller(engine, header, cache)
    for session in (ours, theirs):
        session.handle(events.Admit("self-check"), 0.0)
        session.handle(events.Open(header.handoff_id, epoch), 0.0)
    for block, run in header.layout.chunks():
        parts = encoder.encode(block, run)
        digest = ours.send_chunk(block, run, parts, 0.0)
        wire = memoryview(b"".join(parts))
        theirs.handle(events.Chunk(block, run, wire, digest), 0.0)
        installer.install(block, run, wire)
    theirs.handle(events.Commit(ours.make_seal(SenderTimings())), 0.0)
    installer.finish()
    theirs.handle(events.Map(), 0.0)
    theirs.handle(events.Install(), 0.0)
    if theirs.state is not State.INSTALLED:
        raise InternalError(f"self-check: the session ended in {theirs.state}")


def _check_equal(header: Header, own: PrefixCache, cache: PrefixCache) -> None:
    for block, run in header.layout.chunks():
        for piece in header.layout.slices(block, run):
            place = piece.layer, piece.kind, piece.start, piece.stop
            if not torch.equal(own.tensor(*place), cache.tensor(*place)):
                raise InternalError(f"self-check: layer {piece.layer} {piece.kind} differs")


def _answer(engine: Engine, cache: PrefixCache, ids: list[int]) -> tuple[int, ...]:
    sampling = Sampling(max_new_tokens=_ANSWER_TOKENS, ignore_eos=True)
    for item in engine.answer(cache, ids, [ids[0]], sampling):
        if isinstance(item, Finish):
            return item.generated_ids
    raise InternalError("self-check: the answer has no end")
