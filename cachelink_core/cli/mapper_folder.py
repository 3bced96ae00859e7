"""A mapper on disk, as ``inspect`` and ``verify`` show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cachelink_core.errors import DataLoss, ManifestError

if TYPE_CHECKING:
    from cachelink_core.transport.card import Card

CARD_FILE = "card.json"


@dataclass(frozen=True, slots=True)
class MapperFolder:
    """A mapper's artifact.

    Attributes:
        path: of the folder.
        card: its own digest checked.
    """

    path: Path
    card: Card

    @property
    def digest(self) -> str:
        """Of the whole artifact, in hexadecimal."""
        return self.card.digest

    def summary(self) -> dict[str, object]:
        """What a person wants to know."""
        card = self.card
        fit, training, gate = card.fit, card.training, card.gate
        return {
            "mapper": str(self.path),
            "digest": card.digest,
            "sender": _model(card.sender),
            "receiver": _model(card.receiver),
            "sources": "; ".join(
                f"{layer}: {' '.join(map(str, found.sources))}"
                for layer, found in enumerate(card.layers)
            ),
            "heads": "all" if card.heads == "all" else "local",
            "ridge": "made by hand"
            if fit is None
            else f"{fit.selection}, lambda {fit.lambda_value:g} ({fit.lambda_mode}), "
            f"{fit.observations} observations",
            "R2 held out": f"K {_mean(f.key.r2_held_out for f in card.layers)}, "
            f"V {_mean(f.value.r2_held_out for f in card.layers)}",
            "warnings": "; ".join(fit.warnings) if fit and fit.warnings else "none",
            "residual": "none"
            if card.residual is None
            else f"stems {card.residual.stem}, fused {card.residual.fused}",
            "training": "none"
            if training is None
            else f"{training.steps} steps of {training.loss}, seed {training.seed}",
            "gate": "never run"
            if gate is None
            else f"{'passed' if gate.passed else 'FAILED'}: "
            + ", ".join(f"{arm} {kl:.4f}" for arm, kl in gate.kl.items())
            + f" nats over {gate.tokens} tokens, worst layer {gate.worst_layer}",
        }

    def document(self) -> dict[str, Any]:
        """The same for a program: the card."""
        return {
            "kind": "mapper",
            "digest": self.card.digest,
            "card": msgspec.to_builtins(self.card),
        }

    def verify(self) -> dict[str, object]:
        """Reads every tensor and checks its digest.

        Raises:
            DataLoss: a changed byte; the tensor is named.
        """
        from cachelink_core.transport.artifact import verify_mapper

        try:
            card = verify_mapper(self.path)
        except ManifestError as error:
            raise DataLoss(f"{self.path}: {error}") from error
        return {
            "digest": card.digest,
            "checked": ["card digest", "shapes", "tensor digests"],
            "tensors": len(card.tensors),
        }


def read_mapper_folder(path: Path) -> MapperFolder:
    """Reads the card of a mapper's folder.

    Raises:
        DataLoss: the card is malformed or was changed.
    """
    from cachelink_core.transport.artifact import read_card

    try:
        return MapperFolder(path, read_card(path))
    except ManifestError as error:
        raise DataLoss(f"{path}: {error}") from error


def _model(identity: Any) -> str:
    return (
        f"{identity.architecture}, {len(identity.layers)} layers, {identity.dtype}, "
        f"identity {identity.digest()}"
    )


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.4f}" if known else "unknown"
