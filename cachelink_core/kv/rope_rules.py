"""Finds by measurement how a layer rotates its keys.

Axes: H KV heads, T tokens, D head dim, W table width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cachelink_core.errors import UnsupportedModel
from cachelink_core.identity import KeyLayout
from cachelink_core.kv.rope_probe import LayerEvidence, ProbedCall
from cachelink_core.kv.rope_tables import RotaryCall
from cachelink_core.kv.rotation import Columns, pair_columns, unrotate

RESIDUAL_LIMIT: Final = 1e-4
"""Largest residual of an accepted rule for a float32 model, whose right rule measures 1e-6 or less.
Wrong rules measure 0.1 to 3."""

CLEAR_MARGIN: Final = 4.0
"""Every other rule must be this many times worse than the limit."""


@dataclass(frozen=True, slots=True)
class LayerRule:
    """How one layer rotates its keys, as measured.

    Attributes:
        layout: which channels form a pair; ``identity`` for a layer without RoPE.
        rotary_dim: channels that turn.
        residual: max |stripped cached key - key before the rotation| / max |key before it|.
        table: name of the tables; empty for ``identity``.
        columns: where the tables keep the angles.
        kv_heads: H of the cached keys.
        head_dim: D of the cached keys.
    """

    layout: KeyLayout
    rotary_dim: int
    residual: float
    table: str
    columns: Columns
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.layout}/{self.rotary_dim}" + (f" by {self.table}" if self.table else "")


def residual_limit(dtype: torch.dtype) -> float:
    """The largest residual of a right rule in a model of that dtype.

    A float32 model is held to ``RESIDUAL_LIMIT``. A bf16 model rotates in bf16: two products and a
    sum, each rounded by at most ε/2 relative. Rotated back that leaves at most 2√2·ε/2 of the
    pair's radius, which is at most √2 times the largest key: 2 ε, 1.6e-2 for bf16 (up to 0.6 ε were
    seen). Casting what was hooked to float32 does not undo that rounding, and a float32 copy of a
    large model does not fit beside it. What keeps the wide limit sound is the margin: the rules are
    few and discrete, and every other one must miss by ``CLEAR_MARGIN`` times the limit.
    """
    return max(RESIDUAL_LIMIT, 2 * torch.finfo(dtype).eps)


def choose_rule(where: str, evidence: LayerEvidence) -> tuple[LayerRule, RotaryCall | None]:
    """The one rule that explains the evidence.

    Args:
        where: the layer, for messages.
        evidence: from the probe.

    Returns:
        the rule, and the rotary call of its tables (None for ``identity``).

    Raises:
        UnsupportedModel: no rule explains it, or more than one; with the residual of each.
    """
    measured = sorted(measure_rules(evidence), key=lambda pair: pair[0].residual)
    rule, call = measured[0]
    limit = residual_limit(evidence.keys.dtype)
    shape = (rule.layout, rule.rotary_dim)
    others = [other for other, _ in measured if (other.layout, other.rotary_dim) != shape]
    clear = all(other.residual >= CLEAR_MARGIN * limit for other in others)
    if rule.residual < limit and clear:
        return rule, call
    numbers = ", ".join(f"{rule} {rule.residual:.2g}" for rule, _ in measured)
    problem = "more than one rule fits" if rule.residual < limit else "no rule fits"
    raise UnsupportedModel(
        f"{where}: {problem} how its keys are rotated; residuals (limit {limit:.1g}): {numbers}"
    )


def measure_rules(evidence: LayerEvidence) -> Iterator[tuple[LayerRule, RotaryCall | None]]:
    """Every rule with its residual, best key source each."""
    head_dim = evidence.keys.shape[-1]
    sources = [source.float() for source in key_sources(evidence)]
    unrotated = evidence.keys.float()
    yield _rule(evidence, "identity", 0, None, "all", _residual(unrotated, sources)), None
    for probed in evidence.calls:
        for layout, rotary_dim, columns in _candidates(probed.cos.shape[-1], head_dim):
            cos = pair_columns(probed.cos[0], columns).float()
            sin = pair_columns(probed.sin[0], columns).float()
            content = unrotate(evidence.keys, cos, sin, layout, rotary_dim)
            residual = _residual(content, sources)
            yield _rule(evidence, layout, rotary_dim, probed, columns, residual), probed.call


def _candidates(width: int, head_dim: int) -> Iterator[tuple[KeyLayout, int, Columns]]:
    """Rules that a table of that width allows."""
    if width <= head_dim and width % 2 == 0:
        yield "half", width, "first_half"
        yield "interleaved", width, "first_half"
        yield "interleaved", width, "even"
    if 2 * width <= head_dim:
        yield "half_narrow_tables", 2 * width, "all"
        yield "interleaved", 2 * width, "all"


def _rule(
    evidence: LayerEvidence,
    layout: KeyLayout,
    rotary_dim: int,
    probed: ProbedCall | None,
    columns: Columns,
    residual: float,
) -> LayerRule:
    heads, _, head_dim = evidence.keys.shape
    table = probed.call.name if probed else ""
    return LayerRule(layout, rotary_dim, residual, table, columns, heads, head_dim)


def _residual(content: Tensor, sources: list[Tensor]) -> float:
    """Smallest over the sources; infinite where it is not a number."""
    residuals = [((content - source).abs().max() / source.abs().max()).item() for source in sources]
    return min((value for value in residuals if not math.isnan(value)), default=float("inf"))


def key_sources(evidence: LayerEvidence) -> list[Tensor]:
    """Every tensor ``[H, T, D]`` that may be the keys before the rotation.

    A key norm counts only if it was fed by a projection: one that comes after the rotation gives
    exactly the cached keys, and would pass the layer off as one without RoPE.
    """
    shape = evidence.keys.shape
    projected = [view for raw in evidence.projections for view in key_views(raw, *shape)]
    normed = [
        view
        for fed, raw in evidence.norms
        if any(torch.equal(a, b) for a in key_views(fed, *shape) for b in projected)
        for view in key_views(raw, *shape)
    ]
    return projected + normed


def key_views(raw: Tensor, heads: int, tokens: int, head_dim: int) -> Iterator[Tensor]:
    """Every way in which a module's output may hold the keys, each as ``[H, T, D]``.

    Norms give ``[1, H, T, D]``, ``[1, T, H, D]`` or ``[1, T, H·D]``. Fused projections put query,
    key and value heads one after the other, or alternate them a KV head.
    """
    if raw.dim() == 4 and raw.shape[1:] == (heads, tokens, head_dim):
        yield raw[0]
    per_token, rest = divmod(raw.numel(), tokens * head_dim)
    if rest:
        return
    rows = raw.reshape(tokens, per_token, head_dim) if raw.is_contiguous() else None
    if rows is None and raw.dim() == 4 and raw.shape[1] == tokens:
        rows = raw[0]
    if rows is None or per_token < heads:
        return
    if per_token == heads:
        yield rows.transpose(0, 1)
        return
    queries = per_token - 2 * heads
    if queries > 0:
        yield rows[:, queries : queries + heads].transpose(0, 1)
    if per_token % heads == 0:
        yield rows.reshape(tokens, heads, per_token // heads, head_dim)[:, :, -2].transpose(0, 1)
