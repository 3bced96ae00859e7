"""Options that say how exact a cache must be."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class LeastTrust(StrEnum):
    """The least that is good enough."""

    EXACT = "exact"
    LOSSY = "lossy"
    MAPPED = "mapped"


TrustOption = Annotated[
    LeastTrust, typer.Option("--least-trust", help="The least exact cache that is good enough.")
]
ErrorOption = Annotated[
    float | None,
    typer.Option("--max-error", metavar="NATS", help="Largest expected next-token KL of a cache."),
]
