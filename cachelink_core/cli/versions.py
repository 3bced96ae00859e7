"""Versions of this distribution, of Python and of what matters most beneath them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from cachelink_core import __version__

_PACKAGES: Final = ("grpcio", "protobuf", "msgspec", "zstandard", "torch", "transformers")


def versions() -> dict[str, str]:
    """By name. They are read from metadata, so that none of the packages is imported for it."""
    found = {"cachelink": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
