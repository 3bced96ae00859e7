"""A mapper's card: everything about a learned transport except its tensors. Pure data, no torch.

``card.json`` is this struct. Its digest covers the card without the digest, and the card lists a
digest for each tensor: so one name stands for the whole artifact.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3

from cachelink_core import limits
from cachelink_core.codec_spec import DType, TensorKind
from cachelink_core.errors import ManifestError
from cachelink_core.identity import Digest, ModelIdentity, canonical_bytes

SCHEMA: Final = 1
"""Raised when a reader of the old schema would misunderstand a card."""

KINDS: Final[tuple[TensorKind, TensorKind]] = ("K", "V")

LambdaMode = Literal["sum", "mean", "relative", "heldout"]
"""What λ is added to: the summed Gram, the Gram divided by the number of observations, a fraction of
the Gram's mean diagonal, or such a fraction chosen on held-out text. Fits of different modes are not
comparable by λ."""

Selection = Literal["same-head", "all-head", "greedy", "given"]
"""How the source layers of a target layer were chosen."""

LayerIndex = Annotated[int, msgspec.Meta(ge=0, lt=limits.MAX_LAYERS)]
HeadIndex = Annotated[int, msgspec.Meta(ge=0, lt=limits.MAX_KV_HEADS)]
Plain = dict[str, str | int | float | bool | None]


class KindFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one kind of one target layer was fitted.

    Attributes:
        ridge_lambda: λ as the card's mode counts it; the one that was used, after escalation.
        r2_in_sample: mean over target heads, None where nothing varies.
        r2_held_out: the same on documents that the fit has not seen, None without any.
    """

    ridge_lambda: float = 0.0
    r2_in_sample: float | None = None
    r2_held_out: float | None = None


class LayerFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One target layer.

    Attributes:
        sources: S_l, sender layers in ascending order, which is their order inside X.
        key: the fit of the keys.
        value: the fit of the values.
    """

    sources: Annotated[tuple[LayerIndex, ...], msgspec.Meta(min_length=1)]
    key: KindFit = KindFit()
    value: KindFit = KindFit()


class CalibrationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The text that a fit saw.

    Attributes:
        source: as named by whoever ran the fit.
        digest: over the token sequences and their split.
        sequences: fitted on.
        held_out_sequences: of other documents.
        length: tokens of a sequence.
        stride: every how manyth position is an observation.
        documents: fitted on.
        held_out_documents: not fitted on.
        seed: of the order of documents.
    """

    source: str
    digest: Digest
    sequences: int
    held_out_sequences: int
    length: int
    stride: int
    documents: int
    held_out_documents: int
    seed: int


class FitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How Ridge was solved.

    Attributes:
        selection: of the source layers.
        lambda_mode: what λ means.
        lambda_value: as asked for; where the mode chooses, the largest candidate.
        observations: tokens fitted on.
        held_out_observations: tokens that R² held out is computed on.
        warnings: everything that was not as asked for, such as a λ that had to be raised.
        calibration: the text, None for a map that was not fitted on any.
    """

    selection: Selection
    lambda_mode: LambdaMode
    lambda_value: float
    observations: int
    held_out_observations: int
    warnings: tuple[str, ...] = ()
    calibration: CalibrationRecord | None = None


class ResidualShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the late-fusion residual.

    Attributes:
        stem: units of each of the two stems.
        fused: units behind them.
        standardised: whether its input is standardised by fixed means and scales.
    """

    stem: Annotated[int, msgspec.Meta(ge=1)] = 256
    fused: Annotated[int, msgspec.Meta(ge=1)] = 512
    standardised: bool = False


class TrainingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the residual was trained.

    Attributes:
        steps: of the optimiser.
        loss: for instance ``ce+kl``.
        seed: of data order and initialisation.
        data: what it was trained on, as named by whoever ran it.
        data_digest: over the token sequences.
        settings: every further hyper-parameter.
        results: final figures by name.
    """

    steps: int
    loss: str
    seed: int
    data: str
    data_digest: Digest
    settings: Plain = {}
    results: dict[str, float] = {}


class GateRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The functional quality gate: next-token KL to the native receiver on held-out text.

    Attributes:
        passed: ``kl["mapped"] <= threshold * min(kl["mismatched"], kl["zeroed"])``.
        threshold: of that rule.
        kl: mean in nats by arm: ``own``, ``mapped``, ``mismatched``, ``zeroed``.
        tokens: that the means are over.
        text: what was judged on.
        text_digest: over the token sequences.
        attention_cosine: of each layer's attention output; reported, never decides.
        reported: every further figure by name; none decides.
    """

    passed: bool
    threshold: float
    kl: dict[str, float]
    tokens: int
    text: str
    text_digest: Digest
    attention_cosine: tuple[float, ...] = ()
    reported: dict[str, float] = {}

    @property
    def worst_layer(self) -> int | None:
        """Layer with the smallest attention-output cosine, None if they were not measured."""
        cosines = self.attention_cosine
        return min(range(len(cosines)), key=cosines.__getitem__) if cosines else None


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One mapper.

    Attributes:
        schema: of this file.
        sender: the model whose cache is read.
        receiver: the model whose cache is written.
        layers: one entry a receiver layer.
        heads: ``all``, or for each receiver head the sender heads that it reads (head-local).
        weights_dtype: of the Ridge and residual weights in the file.
        bos_id: token at whose position 0 the stored native keys and values are used, None for none.
        fit: how Ridge was solved, None for a map made by hand.
        residual: its sizes, None for Ridge alone.
        training: how the residual was trained.
        gate: the last quality gate.
        tensors: BLAKE3-256 of each tensor's bytes by name.
        digest: of the artifact.
    """

    sender: ModelIdentity
    receiver: ModelIdentity
    layers: tuple[LayerFit, ...]
    schema: int = SCHEMA
    heads: Literal["all"] | tuple[tuple[HeadIndex, ...], ...] = "all"
    weights_dtype: DType = "float32"
    bos_id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    fit: FitRecord | None = None
    residual: ResidualShape | None = None
    training: TrainingRecord | None = None
    gate: GateRecord | None = None
    tensors: dict[str, Digest] = {}
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""

    def compute_digest(self) -> str:
        """BLAKE3-256 over the card, the digest itself left out, in hexadecimal."""
        return blake3(canonical_bytes(msgspec.structs.replace(self, digest=""))).hexdigest()

    def source_channels(self, layer: int) -> int:
        """Width of X: channels of all source heads of S_l."""
        return sum(self._channels(self.sender, j) for j in self.layers[layer].sources)

    def target_channels(self, layer: int) -> int:
        """Width of one kind of a receiver layer."""
        return self._channels(self.receiver, layer)

    @staticmethod
    def _channels(identity: ModelIdentity, layer: int) -> int:
        geometry = identity.layers[layer]
        return geometry.kv_heads * geometry.head_dim

    def check(self) -> None:
        """Checks what the types cannot say.

        Raises:
            ManifestError: a newer schema, a layer set that is unordered, repeated or outside the
                sender, a source layer that forgets tokens, or head lists that fit neither model.
        """
        if self.schema != SCHEMA:
            raise ManifestError(f"schema is {self.schema}; this version reads {SCHEMA}")
        if len(self.layers) != len(self.receiver.layers):
            raise ManifestError(
                f"layers has {len(self.layers)} entries; "
                f"the receiver has {len(self.receiver.layers)} layers"
            )
        for index, layer in enumerate(self.layers):
            check_sources(f"layers[{index}].sources", layer.sources, self.sender)
        if self.heads != "all":
            _check_heads(self)


def check_sources(field: str, sources: tuple[int, ...], sender: ModelIdentity) -> None:
    """Checks one layer set.

    A sliding layer of the sender no longer holds the first tokens, so nothing can be read from it.

    Raises:
        ManifestError: names the field and the value.
    """
    if list(sources) != sorted(set(sources)):
        raise ManifestError(f"{field} is {list(sources)}; layers are ascending and differ")
    for source in sources:
        if source >= len(sender.layers):
            raise ManifestError(
                f"{field} has layer {source}; the sender has {len(sender.layers)} layers"
            )
        if sender.layers[source].attention != "full":
            raise ManifestError(
                f"{field} has layer {source}, which keeps a window of "
                f"{sender.layers[source].window} tokens; only full layers hold every token"
            )


def _check_heads(card: Card) -> None:
    assert card.heads != "all"
    read = {layer for fit in card.layers for layer in fit.sources}
    shapes = {(card.sender.layers[i].kv_heads, card.sender.layers[i].head_dim) for i in read}
    if len(shapes) != 1:
        raise ManifestError(f"heads: source layers have heads of {sorted(shapes)}; they must agree")
    sender_heads = next(iter(shapes))[0]
    counts = {layer.kv_heads for layer in card.receiver.layers}
    if counts != {len(card.heads)}:
        raise ManifestError(
            f"heads has {len(card.heads)} entries; receiver layers have {sorted(counts)} heads"
        )
    widths = {len(read_heads) for read_heads in card.heads}
    if len(widths) != 1 or widths == {0}:
        raise ManifestError(f"heads: entries read {sorted(widths)} heads; all read equally many")
    worst = max(max(read_heads) for read_heads in card.heads)
    if worst >= sender_heads:
        raise ManifestError(f"heads has sender head {worst}; the sender has {sender_heads} heads")


def local_heads(sender_heads: int, receiver_heads: int) -> tuple[tuple[int, ...], ...]:
    """The sender heads that each receiver head reads when heads are paired by place.

    With at least as many receiver heads each reads one, ``floor(h · H_s / H_t)``; with fewer, each
    reads its share of the sender's.
    """
    if receiver_heads >= sender_heads:
        return tuple((h * sender_heads // receiver_heads,) for h in range(receiver_heads))
    group = -(-sender_heads // receiver_heads)
    last = sender_heads - group
    return tuple(
        tuple(range(first, first + group))
        for first in (min(h * sender_heads // receiver_heads, last) for h in range(receiver_heads))
    )


def encode_card(card: Card) -> bytes:
    """JSON for people and programs."""
    return msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"


def decode_card(data: bytes) -> Card:
    """Reads and checks a card, its digest included if it has one.

    Raises:
        ManifestError: malformed, contradictory, or changed since it was written.
    """
    try:
        card = msgspec.json.decode(data, type=Card)
    except msgspec.DecodeError as error:
        raise ManifestError(f"card: {error}") from error
    card.check()
    if card.digest and card.digest != card.compute_digest():
        raise ManifestError(f"card: digest is {card.compute_digest()}, written was {card.digest}")
    return card


__all__ = [
    "KINDS",
    "SCHEMA",
    "CalibrationRecord",
    "Card",
    "FitRecord",
    "GateRecord",
    "KindFit",
    "LambdaMode",
    "LayerFit",
    "ResidualShape",
    "Selection",
    "TrainingRecord",
    "check_sources",
    "decode_card",
    "encode_card",
    "local_heads",
]
