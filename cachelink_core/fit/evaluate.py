"""How well translated caches predict held-out continuations, while a residual is learned.

Axes: B rows, Q tokens read behind the prefix, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cachelink_core.fit.aligned import Aligned
from cachelink_core.fit.losses import forward_kl


@dataclass(slots=True)
class Predictions:
    """Sums over examples, each of which weighs the same however long it is.

    Attributes:
        examples: added so far.
        ce: cross-entropy, nats a token.
        kl: native ‖ mapped, nats a token.
        agreement: share of tokens at which both find the same token likeliest.
    """

    examples: int = 0
    ce: float = 0.0
    kl: float = 0.0
    agreement: float = 0.0

    def add(self, native: Tensor, mapped: Tensor, aligned: Aligned) -> None:
        """Adds some examples.

        Args:
            native: logits with the receiver's own caches ``[B, Q, V]``.
            mapped: logits with translated ones.
            aligned: what should follow, and what counts.
        """
        weight = aligned.counted / aligned.counted.sum(1, keepdim=True)
        likely = mapped.log_softmax(-1).gather(-1, aligned.targets.unsqueeze(-1)).squeeze(-1)
        self.examples += native.shape[0]
        self.ce -= float((likely * weight).sum())
        self.kl += float((forward_kl(native, mapped) * weight).sum())
        self.agreement += float(((mapped.argmax(-1) == native.argmax(-1)) * weight).sum())

    def means(self) -> tuple[float, float, float]:
        """(cross-entropy, KL, agreement), each the mean over examples."""
        return self.ce / self.examples, self.kl / self.examples, self.agreement / self.examples
