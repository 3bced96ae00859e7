"""How a node tells that it is serial; loads no torch, so that a client can ask."""

from __future__ import annotations

from typing import Final

from cachelink_core import __version__

SERIAL_VERSION: Final = f"{__version__}+serial"
"""What a serial node says it is."""


def is_serial(version: str) -> bool:
    """Whether a node that says this version works one stage after another."""
    return version.endswith("+serial")
