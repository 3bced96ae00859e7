"""The kernels compiled for the shapes of full blocks: C++ on a CPU, Triton on CUDA.

Torch's compiler, inductor, makes one loop of each function of ``kernels.py``. A kernel is compiled for exact
shapes, compared with the plain function, and kept; whatever else comes (a short block, the block of
the sinks, another dtype) runs plain, so that nothing is compiled while a handoff waits.

A CPU kernel keeps to the thread that calls it: the model computes beside it.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from cachelink_core.codecs import kernels
from cachelink_core.codecs.kernels import PLAIN, Encoded, PairAngles
from cachelink_core.errors import InternalError

COMPILERS: Final = ("g++", "clang++", "c++")
"""What torch looks for on a CPU host."""

_OPTIONS: Final[dict[str, Any]] = {"cpp.threads": 1, "compile_threads": 1}
"""One thread in a kernel, and no pool of compiler processes that would outlive the start."""

_Static = tuple[int | torch.dtype, ...]
_Key = tuple[str, tuple[tuple[torch.Size, torch.dtype], ...], str, _Static]
_Function = Callable[..., Any]


def missing_compiler(device: torch.device) -> str | None:
    """What keeps ``device``'s kernels from being compiled; None if nothing is known to."""
    if device.type == "cuda":
        return None if find_spec("triton") else "Triton is not installed"
    if any(shutil.which(name) for name in COMPILERS):
        return None
    return f"none of {', '.join(COMPILERS)} is on the path"


class CompiledKernels:
    """``Kernels`` that are compiled for some shapes and plain for the others.

    Filled by the ``compile_`` methods before it is shared; after that any thread may call it.

    Attributes:
        compile_s: seconds spent in those methods.
    """

    def __init__(self) -> None:
        self.compile_s = 0.0
        self._held: dict[_Key, _Function] = {}
        self._turning: set[tuple[bool, torch.Size, torch.dtype, str, int, int, int]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def compile_keys(
        self, rows: Tensor, angles: PairAngles | None, top: int, group: int, *, encode: bool
    ) -> None:
        """Compiles one of the two functions of keys.

        Args:
            rows: ``[H, T, D]``, to be encoded, or in the dtype to be decoded to.
            angles: ``[T, P]`` each, to turn in the same pass; None for content space.
            top: the highest code.
            group: N; divides T.
            encode: or decode.

        Raises:
            InternalError: the compiled function is not the plain one.
            Exception: whatever the compiler raised.
        """
        encoded = kernels.encode_keys(rows, angles, top, group)

        def encode_flat(keys: Tensor, *turn: Tensor) -> Encoded:
            found = kernels.encode_keys(keys, turn or None, top, group)  # type: ignore[arg-type]
            return found[0], found[1] + _poison(keys).transpose(0, 1), found[2]

        def decode_flat(scales: Tensor, zeros: Tensor, codes: Tensor, *turn: Tensor) -> Tensor:
            parts = scales, zeros, codes
            return kernels.decode_keys(parts, turn or None, top, rows.dtype)  # type: ignore[arg-type]

        turn = angles or ()
        if encode:
            compiled = self._compile("encode_keys", encode_flat, (rows, *turn), (top, group))
            _check_codes(encoded, compiled, lambda e: PLAIN.decode_keys(e, None, top, rows.dtype))
        else:
            static = top, rows.dtype
            compiled = self._compile("decode_keys", decode_flat, (*encoded, *turn), static)
            _check_values(decode_flat(*encoded, *turn), compiled, exact=angles is None)
        if angles is not None:
            self._turning.add(_turn_key(rows, angles[0].shape[-1], top, group, encode=encode))

    def compile_values(self, rows: Tensor, top: int, width: int, *, encode: bool) -> None:
        """Compiles one of the two functions of values; arguments and errors as ``compile_keys``."""
        dim, dtype = rows.shape[2], rows.dtype
        encoded = kernels.encode_values(rows, top, width)

        def encode_flat(values: Tensor) -> Encoded:
            found = kernels.encode_values(values, top, width)
            return found[0], (found[1].float() + _poison(values)).bfloat16(), found[2]

        def decode_flat(scales: Tensor, zeros: Tensor, codes: Tensor) -> Tensor:
            return kernels.decode_values((scales, zeros, codes), dim, top, width, dtype)

        if encode:
            compiled = self._compile("encode_values", encode_flat, (rows,), (top, width))
            _check_codes(
                encoded, compiled, lambda e: PLAIN.decode_values(e, dim, top, width, dtype)
            )
        else:
            static = dim, top, width, dtype
            compiled = self._compile("decode_values", decode_flat, encoded, static)
            _check_values(decode_flat(*encoded), compiled, exact=True)

    def turns(self, rows: Tensor, pairs: int, top: int, group: int, *, encode: bool) -> bool:
        """Where a kernel that turns was compiled."""
        return _turn_key(rows, pairs, top, group, encode=encode) in self._turning

    def encode_keys(self, keys: Tensor, angles: PairAngles | None, top: int, group: int) -> Encoded:
        """See ``kernels.encode_keys``."""
        given = (keys, *(angles or ()))
        held = self._held.get(_key("encode_keys", given, (top, group)))
        if held is None:
            return PLAIN.encode_keys(keys, angles, top, group)
        encoded: Encoded = _run(held, given)
        return encoded

    def encode_values(self, values: Tensor, top: int, width: int) -> Encoded:
        """See ``kernels.encode_values``."""
        held = self._held.get(_key("encode_values", (values,), (top, width)))
        if held is None:
            return PLAIN.encode_values(values, top, width)
        encoded: Encoded = _run(held, (values,))
        return encoded

    def decode_keys(
        self, encoded: Encoded, angles: PairAngles | None, top: int, dtype: torch.dtype
    ) -> Tensor:
        """See ``kernels.decode_keys``."""
        given = (*encoded, *(angles or ()))
        held = self._held.get(_key("decode_keys", given, (top, dtype)))
        if held is None:
            return PLAIN.decode_keys(encoded, angles, top, dtype)
        keys: Tensor = _run(held, given)
        return keys

    def decode_values(
        self, encoded: Encoded, dim: int, top: int, width: int, dtype: torch.dtype
    ) -> Tensor:
        """See ``kernels.decode_values``."""
        held = self._held.get(_key("decode_values", encoded, (dim, top, width, dtype)))
        if held is None:
            return PLAIN.decode_values(encoded, dim, top, width, dtype)
        values: Tensor = _run(held, encoded)
        return values

    def _compile(
        self, name: str, function: _Function, given: tuple[Tensor, ...], static: _Static
    ) -> Any:
        """Compiles and keeps; returns what the compiled function makes of ``given``."""
        began = time.monotonic()
        # Imported here: it takes seconds, which a node that compiles nothing need not wait.
        import torch._inductor as inductor
        from torch._inductor import config
        from torch.fx.experimental.proxy_tensor import make_fx

        # Traced and compiled here and not through torch.compile: that guards each call against
        # everything that might have changed, for as long as a whole small tensor takes, and would
        # compile anew if something had. ``_key`` is the only guard that these kernels need.
        with torch.inference_mode(), warnings.catch_warnings(), config.patch(_OPTIONS):
            warnings.simplefilter("ignore")
            contiguous: list[Any] = [tensor.contiguous() for tensor in given]
            compiled = inductor.compile(make_fx(function)(*contiguous), contiguous)
            result = compiled(*contiguous)
        self._held[_key(name, given, static)] = compiled
        self.compile_s += time.monotonic() - began
        return result


def _poison(rows: Tensor) -> Tensor:
    """Zero for each head ``[H, 1, 1]``, or NaN for one that holds NaN or infinity.

    Compiled minima, maxima and roundings do not all keep NaN, and codes would hide it. Added to the
    zero points, this makes the codec refuse the slice.
    """
    numbers = rows.float()
    # Not a product with 0, which the compiler takes for 0.
    return (numbers - numbers).sum((1, 2), keepdim=True)


def _run(function: _Function, given: tuple[Tensor, ...]) -> Any:
    """Calls with the strides that it was compiled for."""
    with torch.inference_mode():
        return function(*(tensor.contiguous() for tensor in given))


def _key(name: str, given: tuple[Tensor, ...], static: _Static) -> _Key:
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in given)
    return name, shapes, given[0].device.type, static


def _turn_key(
    rows: Tensor, pairs: int, top: int, group: int, *, encode: bool
) -> tuple[bool, torch.Size, torch.dtype, str, int, int, int]:
    return encode, rows.shape, rows.dtype, rows.device.type, pairs, top, group


def _check_codes(wanted: Encoded, found: Encoded, decode: Callable[[Encoded], Tensor]) -> None:
    """Decodes both: no number may be further apart than a step."""
    step = wanted[0].float().max().item()
    apart = (decode(wanted) - decode(found)).abs().max().item()
    if not apart <= 1.01 * step:
        raise InternalError(f"a compiled encoder is {apart} apart from the plain one, step {step}")


def _check_values(wanted: Tensor, found: Tensor, *, exact: bool) -> None:
    """Compares the bits, or, where keys were turned, up to the rounding of one operation more."""
    apart = (wanted.float() - found.float()).abs().max().item()
    limit = 0.0 if exact else torch.finfo(wanted.dtype).eps * 2 * wanted.abs().max().item()
    if not apart <= limit:
        raise InternalError(f"a compiled decoder is {apart} apart from the plain one, not {limit}")
