"""How long each captured prefix took to prefill, kept beside the captured caches.

A prefix that is read back from disk is not prefilled, so a later run has no time of its own for it. It
then reports the one that was measured when the cache was captured, with its date. A captured cache is the
same whoever prefilled it, its time is not: each setting and mode has a folder of its own.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from cachelink_bench.two_node.plan import Mode
from cachelink_core.errors import ConfigError

FILE: Final = "prefill-times.jsonl"


def capture_folder(root: Path, setting: str, mode: Mode) -> Path:
    """Where the sender of a mode keeps what it prefills in a setting.

    Args:
        root: of all settings.
        setting: machine and threads.
        mode: of the sender.
    """
    return root / blake3(f"{setting}, {mode}".encode()).hexdigest()[:12]


class PrefillTime(msgspec.Struct, frozen=True):
    """One prefill that was measured.

    Attributes:
        setting: machine and threads: another one's time says nothing here.
        identity: digest of the model.
        ids_digest: of the prefix.
        seconds: from the first to the last block.
        date: UTC.
    """

    setting: str
    identity: str
    ids_digest: str
    seconds: float
    date: str


class PrefillTimes:
    """The times of one machine and one model."""

    def __init__(self, folder: Path | None, setting: str, identity: str) -> None:
        """Reads what is there.

        Args:
            folder: of the captured caches; None keeps no times.
            setting: machine and threads.
            identity: digest of the model.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._path = folder and folder / FILE
        self._setting = setting
        self._identity = identity
        self._known: dict[str, PrefillTime] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def get(self, ids_digest: str) -> PrefillTime | None:
        """The last time that a prefix took."""
        return self._known.get(ids_digest)

    def add(self, ids_digest: str, seconds: float) -> None:
        """Keeps a time that was measured just now."""
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        item = PrefillTime(self._setting, self._identity, ids_digest, seconds, date)
        self._known[ids_digest] = item
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(item) + b"\n")

    def _read(self, path: Path) -> None:
        try:
            for line in path.read_bytes().splitlines():
                item = msgspec.json.decode(line, type=PrefillTime)
                if (item.setting, item.identity) == (self._setting, self._identity):
                    self._known[item.ids_digest] = item
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
