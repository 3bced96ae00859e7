"""The mappers that this receiver holds: which sender's cache it can translate, and whether it may."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cachelink_core.engine.base import Engine
from cachelink_core.errors import ConfigError, IdentityMismatch, IncompatiblePeer
from cachelink_core.identity import FieldDiff, ModelIdentity
from cachelink_core.logs import logger
from cachelink_core.manifest import MAPPER_ANY, Header
from cachelink_core.transport.artifact import load_mapper
from cachelink_core.transport.card import Card
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.pairing import differences

_log = logger(__name__)


class Mappers:
    """Loaded once at start; picked by the sender's identity."""

    def __init__(self, mappers: Sequence[Mapper], refused: Sequence[Card]) -> None:
        """Wraps loaded mappers.

        Args:
            mappers: usable.
            refused: cards of those that failed their quality gate and were not allowed.
        """
        self._mappers = tuple(mappers)
        self._refused = tuple(refused)

    @classmethod
    def load(cls, folders: Sequence[Path], engine: Engine, *, allow_failed_gate: bool) -> Mappers:
        """Loads and verifies every artifact.

        Args:
            folders: of the artifacts.
            engine: of the receiver's model, which they must write for.
            allow_failed_gate: use mappers that failed their gate or were never judged.

        Raises:
            ConfigError: an artifact writes for another model.
            CacheLinkError: an artifact is missing or damaged.
        """
        usable: list[Mapper] = []
        refused: list[Card] = []
        for folder in folders:
            mapper = load_mapper(folder, device=engine.device, dtype=engine.torch_dtype)
            differing = differences(mapper.card, mapper.card.sender, engine.identity)
            if differing:
                raise ConfigError(f"mapper {folder} is for another receiver: {differing[0]}")
            allowed = gate_passed(mapper.card) or allow_failed_gate
            if allowed:
                usable.append(mapper)
            else:
                refused.append(mapper.card)
            _log.info(
                "mapper_loaded" if allowed else "mapper_refused",
                mapper=mapper.card.digest[:16],
                sender=mapper.card.sender.digest()[:16],
                gate=gate_text(mapper.card),
            )
        return cls(usable, refused)

    def pick(self, header: Header, receiver: ModelIdentity) -> Mapper:
        """The mapper for an offer.

        Raises:
            IncompatiblePeer: the one that fits failed its gate, or the named one is not here.
            IdentityMismatch: no mapper of this receiver reads that sender's cache; names the fields
                in which the nearest one's sender differs.
        """
        wanted = header.mapper
        named = [m for m in self._mappers if wanted in (MAPPER_ANY, m.card.digest)]
        for mapper in named:
            if not differences(mapper.card, header.identity, receiver):
                return mapper
        for card in self._refused:
            if not differences(card, header.identity, receiver):
                raise IncompatiblePeer(
                    f"mapper {card.digest[:16]} fits, but its quality gate {gate_text(card)}; "
                    "allow_failed_gate: true permits it"
                )
        if not named:
            raise IncompatiblePeer(
                f"mapper is {wanted!r}; this receiver has "
                f"{', '.join(m.card.digest[:16] for m in self._mappers) or 'none'}"
            )
        raise IdentityMismatch(self._nearest(named, header, receiver))

    @staticmethod
    def _nearest(
        named: Sequence[Mapper], header: Header, receiver: ModelIdentity
    ) -> tuple[FieldDiff, ...]:
        """The shortest list of differences among the mappers in question."""
        found = [differences(mapper.card, header.identity, receiver) for mapper in named]
        return min(found, key=len)


def gate_passed(card: Card) -> bool:
    """Whether a mapper was judged and found good."""
    return card.gate is not None and card.gate.passed


def gate_text(card: Card) -> str:
    """The gate's outcome in words, as every answer from such a cache carries it."""
    if card.gate is None:
        return "was never run"
    kl = card.gate.kl
    arms = ", ".join(
        f"{arm} {kl[arm]:.3f}" for arm in ("mapped", "mismatched", "zeroed") if arm in kl
    )
    return f"{'passed' if card.gate.passed else 'FAILED'} (KL {arms})"


def mapper_note(mapper: Mapper | None) -> str:
    """What every answer from a translated cache says of its mapper; empty for the same model."""
    if mapper is None:
        return ""
    return f"translated by mapper {mapper.card.digest[:16]}, whose gate {gate_text(mapper.card)}"
