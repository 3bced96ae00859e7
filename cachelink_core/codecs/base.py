"""The two contracts of a payload: tensor to bytes (a codec) and bytes to fewer bytes (a packing).

Axes: H KV heads, T tokens, D head dim. One file per codec; ``registry.py`` names them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from cachelink_core.codec_spec import CodecSpec, DType, PackingSpec, TensorKind


class TensorCodec(ABC):
    """Encodes and decodes one tensor slice. Stateless: one instance serves every thread."""

    def __init__(self, spec: CodecSpec, dtype: DType) -> None:
        """Binds the parameters.

        Args:
            spec: the codec's id and parameters.
            dtype: of the sender's cache.
        """
        self.spec = spec
        self.dtype = dtype

    @abstractmethod
    def encode(self, tensor: Tensor, kind: TensorKind, start: int) -> list[memoryview]:
        """Encodes positions ``[start, start + T)`` of one tensor.

        Args:
            tensor: ``[H, T, D]``, on the CPU or a device, any strides with D contiguous. The
                cache's own dtype, or float32 for keys in content space. Not changed; it must not
                change either until the parts have been consumed, since they may be views of it.
            kind: keys or values.
            start: absolute position of the first token.

        Returns:
            Byte views whose concatenation has exactly ``codec_spec.encoded_bytes`` bytes.
        """

    @abstractmethod
    def decode(self, payload: memoryview, kind: TensorKind, start: int, out: Tensor) -> None:
        """Decodes into ``out``.

        Args:
            payload: exactly ``codec_spec.encoded_bytes`` bytes.
            kind: keys or values.
            start: absolute position of the first token.
            out: ``[H, T, D]``, any float dtype, any device, any strides with D contiguous; every
                element is written.

        Raises:
            CorruptChunk: the payload cannot be what it claims: a wrong length, a scale that is
                negative or not finite, a zero point that is not finite. ``out`` may then be partly
                written.
        """

    # The same in three steps, for payloads that are copied to or from a device in between.

    @abstractmethod
    def encode_parts(self, tensor: Tensor, kind: TensorKind, start: int) -> list[Tensor]:
        """Encodes on the tensor's device; what comes out has yet to be held against ``fault``.

        Args:
            tensor: as for ``encode``.
            kind: keys or values.
            start: absolute position of the first token.

        Returns:
            Contiguous uint8 tensors ``[B]``, whose concatenation is the payload.
        """

    @abstractmethod
    def fault(
        self, payload: memoryview, kind: TensorKind, start: int, shape: tuple[int, int, int]
    ) -> str | None:
        """What is wrong with a payload on the host, as far as it can be told before decoding.

        Args:
            payload: of one slice.
            kind: keys or values.
            start: absolute position of the first token.
            shape: H, T, D of the slice.

        Raises:
            CorruptChunk: a wrong length.
        """

    @abstractmethod
    def decode_from(self, raw: Tensor, kind: TensorKind, start: int, out: Tensor) -> None:
        """Decodes on the device where both lie; ``fault`` has found nothing.

        Args:
            raw: the payload, ``[B]`` uint8, contiguous.
            kind: keys or values.
            start: absolute position of the first token.
            out: as for ``decode``.
        """


class Packing(ABC):
    """Packs the payload of one chunk. Stateless."""

    def __init__(self, spec: PackingSpec) -> None:
        self.spec = spec

    @abstractmethod
    def pack(self, parts: Sequence[memoryview], item_bytes: int) -> list[memoryview]:
        """Packs the concatenation of ``parts``.

        Args:
            parts: byte views.
            item_bytes: width of the floating-point items of the payload, so that their exponents
                and mantissas can be packed apart; 1 for a payload of codes.

        Returns:
            Byte views of the wire bytes: never more than the raw bytes and one escape byte.
        """

    @abstractmethod
    def unpack(self, wire: memoryview, raw_bytes: int, item_bytes: int) -> memoryview:
        """Unpacks to exactly ``raw_bytes`` bytes.

        Raises:
            CorruptChunk: the wire bytes are malformed, or hold fewer bytes than declared.
            DecompressionBomb: they hold more; found before more than that was allocated.
        """
