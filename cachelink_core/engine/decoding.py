"""The token loop: the query in one forward, then one forward for each further token.

Axes: V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from cachelink_core.engine.base import Finish, FinishReason
from cachelink_core.engine.sampling import TokenChooser


@dataclass(frozen=True, slots=True)
class Forward:
    """The outcome of one forward.

    Attributes:
        logits: float32 ``[V]`` of the last position, on the model's device.
        tokens: that went through the model, counted in it.
        waited_s: for the device.
    """

    logits: Tensor
    tokens: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token.

    Attributes:
        token_id: as chosen.
        logits: float32 ``[V]``, raw, that it was chosen from.
    """

    token_id: int
    logits: Tensor


class TokenLoop:
    """Generates the tokens of one answer; iterate once, then ask for ``finish``.

    The last token is not processed: nothing would read its keys and values.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[int]], Forward],
        choose: TokenChooser,
        query_ids: Sequence[int],
        *,
        max_new_tokens: int,
        eos_ids: Collection[int],
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Prepares an answer; nothing runs yet.

        Args:
            forward: processes ids behind the cache.
            choose: the answer's own chooser.
            query_ids: at least one.
            max_new_tokens: at least one.
            eos_ids: tokens that end the answer; empty to go on past them.
            cancelled: asked before each token.
        """
        self._forward = forward
        self._choose = choose
        self._query_ids = query_ids
        self._max_new_tokens = max_new_tokens
        self._eos_ids = frozenset(eos_ids)
        self._cancelled = cancelled
        self._generated: list[int] = []
        self._reason = FinishReason.LENGTH
        self._model_tokens = 0
        self._device_wait_s = 0.0
        self._query_prefill_s = 0.0
        self._first_at = self._last_at = 0.0

    def __iter__(self) -> Iterator[Step]:
        """Yields each token as soon as it is chosen."""
        ids = self._query_ids
        while len(self._generated) < self._max_new_tokens:
            if self._cancelled is not None and self._cancelled():
                self._reason = FinishReason.CANCELLED
                return
            step = self._step(ids)
            if step.token_id in self._eos_ids:
                self._reason = FinishReason.STOP
            yield step
            if self._reason is FinishReason.STOP:
                return
            ids = (step.token_id,)

    def stop(self) -> None:
        """Ends the answer for a reason outside: a stop string."""
        self._reason = FinishReason.STOP

    def finish(self) -> Finish:
        """The account of the answer so far."""
        return Finish(
            reason=self._reason,
            query_tokens=len(self._query_ids),
            generated_ids=tuple(self._generated),
            model_tokens=self._model_tokens,
            query_prefill_s=self._query_prefill_s,
            decode_s=self._last_at - self._first_at,
            device_wait_s=self._device_wait_s,
        )

    def _step(self, ids: Sequence[int]) -> Step:
        began = time.monotonic()
        result = self._forward(ids)
        token_id = self._choose.choose(result.logits)
        self._last_at = time.monotonic()
        if not self._generated:
            self._first_at = self._last_at
            self._query_prefill_s = self._first_at - began
        self._generated.append(token_id)
        self._model_tokens += result.tokens
        self._device_wait_s += result.waited_s
        return Step(token_id, result.logits)
