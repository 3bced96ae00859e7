"""How many facts a training document states: more whenever the model has learnt the present number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_FACTS: Final = 6
FACTS_STEP: Final = 4
LAST_FACTS: Final = 32
PROMOTION_RECALL: Final = 0.9
MEMORY: Final = 0.9
"""Weight of the past in the moving average of recall: about ten fact batches."""


@dataclass
class Curriculum:
    """State of the curriculum.

    Attributes:
        facts: in the documents of the next fact batch.
        average: moving average of recall on training batches since the last promotion.
    """

    facts: int = FIRST_FACTS
    average: float = 0.0

    def observe(self, recall: float) -> None:
        """Takes the recall of one fact batch, before the update on it."""
        self.average = MEMORY * self.average + (1 - MEMORY) * recall
        if self.average > PROMOTION_RECALL and self.facts < LAST_FACTS:
            self.facts = min(self.facts + FACTS_STEP, LAST_FACTS)
            self.average = 0.0
