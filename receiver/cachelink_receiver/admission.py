"""Every reason to refuse a handoff, checked on its header alone, before anything is allocated."""

from __future__ import annotations

from cachelink_core.engine.base import Engine
from cachelink_core.errors import (
    IdentityMismatch,
    InvalidRequest,
    QueryTooLong,
)
from cachelink_core.identity import FieldDiff, ModelIdentity, diff
from cachelink_core.manifest import MAPPER_NONE, Header


def check_fits(engine: Engine, header: Header, max_lease_s: float) -> None:
    """Checks that the receiver can name why the offered cache fits its model.

    Another model's cache needs a mapper; ``Mappers.pick`` names why that one fits.

    There is no switch that turns these checks off.

    Args:
        engine: of the receiver's model.
        header: decoded and consistent in itself.
        max_lease_s: the longest lease that this receiver gives.

    Raises:
        IdentityMismatch: the models differ, field by field, or their RoPE tables do.
        QueryTooLong: the prefix is longer than the model's window.
        InvalidRequest: a token id outside the vocabulary, or too long a lease.
    """
    if header.mapper == MAPPER_NONE:
        check_identity(engine.identity, header.identity)
        _check_tables(engine, header)
    if header.tokens >= engine.identity.max_positions:
        raise QueryTooLong(
            f"token_ids has {header.tokens} tokens; the model's window is "
            f"{engine.identity.max_positions}"
        )
    largest = max(header.ids, default=0)
    if largest >= engine.vocabulary_size:
        raise InvalidRequest(
            f"token_ids holds {largest}; the vocabulary has {engine.vocabulary_size}"
        )
    if header.lease_s > max_lease_s:
        raise InvalidRequest(f"lease_s is {header.lease_s:g}; this receiver gives {max_lease_s:g}")


def check_identity(ours: ModelIdentity, theirs: ModelIdentity) -> None:
    """Compares two identities.

    Raises:
        IdentityMismatch: with every differing field and both values.
    """
    differing = diff(ours, theirs)
    if differing:
        raise IdentityMismatch(differing)


def _check_tables(engine: Engine, header: Header) -> None:
    """Quantized keys are rotated again here, so both sides must use the same tables."""
    if not header.rope_tables_digest:
        return
    ours = engine.rope_tables_digest(header.tokens)
    if ours != header.rope_tables_digest:
        raise IdentityMismatch((FieldDiff("rope_tables", ours, header.rope_tables_digest),))
