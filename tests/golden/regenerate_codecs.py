"""Writes the golden files of codecs and packings anew: ``python tests/golden/regenerate_codecs.py``.

Only after a deliberate change of the wire format: a cache that was stored before can then not be
read any more. Say so in the changelog.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden.codec_cases import FOLDER, files


def main() -> int:
    """Replaces every file of the folder."""
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.iterdir():
        stale.unlink()
    for name, content in files().items():
        (FOLDER / name).write_bytes(content)
        sys.stdout.write(f"{len(content):7d} {name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
