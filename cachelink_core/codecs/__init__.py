"""Tensor codecs and packings, one file each.

Multi-byte numbers on the wire are little-endian, and they are written straight from memory: a
big-endian host would exchange wrong bytes, so it may not import this package.
"""

import sys

if sys.byteorder != "little":
    raise ImportError(
        f"cachelink_core.codecs needs a little-endian host; this one is {sys.byteorder}"
    )
