"""Prefilled caches kept on disk: a document that was read once is not read again, not even after a restart.

One file holds one prefix (``engine/spill.py``), named like its cache: by identity, block size, token
ids and tenant. Every byte is verified when it is read. A folder below the configured one is this
model's alone; nothing else in it is ever touched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cachelink_core.codec_spec import NATIVE, NO_PACKING
from cachelink_core.engine.base import Engine, Prefix
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.spill import restore_cache, save_cache
from cachelink_core.errors import CacheLinkError, ConfigError
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.logs import logger
from cachelink_core.manifest import Header, encode_header

_log = logger(__name__)

_SUFFIX: Final = ".safetensors"

_TABLE_BYTES: Final = 512
"""More than a file's table says of one tensor."""

_TORN_AFTER_S: Final = 3600.0
"""No write takes so long: what is older was left by a process that was killed."""


class Captures:
    """The captured caches of one model, within a byte budget. Safe for threads and processes."""

    def __init__(self, root: Path, budget_bytes: int, *, engine: Engine, block_tokens: int) -> None:
        """Makes the model's folder.

        Args:
            root: several models may share it.
            budget_bytes: this process never makes this model's files take more; those unused for
                longest go first.
            engine: of the model.
            block_tokens: the prefill schedule.

        Raises:
            ConfigError: the folder cannot be made or written to.
        """
        self.folder = root.expanduser() / engine.identity.digest()[:32]
        self._budget_bytes = budget_bytes
        self._engine = engine
        self._block_tokens = block_tokens
        self._writing = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "not writable")
            self._remove_torn()
        except OSError as error:
            raise ConfigError(f"capture_dir is {root}: {error.strerror}") from error

    def holds(self, name: str) -> bool:
        """Whether there is a file for a cache; it may still prove damaged."""
        return self._path(name).exists()

    def restore(self, name: str, ids: Sequence[int], cache: PrefixCache) -> bool:
        """Reads a cache back.

        Args:
            name: of the cache.
            ids: its prefix.
            cache: empty, with room for it.

        Returns:
            Whether ``cache`` holds the prefix now. If not it is still empty; a damaged file was named
            in the log.
        """
        path, began = self._path(name), time.monotonic()
        try:
            restore_cache(path, self._header(Prefix(tuple(ids))), cache)
        except FileNotFoundError:
            return False
        except (CacheLinkError, OSError) as error:
            _log.warning("capture_damaged", path=str(path), cache_id=name, error=str(error))
            return False
        with suppress(OSError):  # another process may have removed it meanwhile
            os.utime(path)
        seconds = round(time.monotonic() - began, 6)
        _log.info("capture_read", cache_id=name, tokens=len(ids), seconds=seconds)
        return True

    def keep(self, name: str, prefix: Prefix, cache: PrefixCache) -> None:
        """Writes a cache; what goes wrong is logged, and costs another prefill later.

        Args:
            name: of the cache.
            prefix: that it holds.
            cache: not freed meanwhile; an answer may be written behind the prefix.
        """
        path, began = self._path(name), time.monotonic()
        with self._writing:
            try:
                header = self._header(prefix)
                size = _file_bytes(header)
                path.unlink(missing_ok=True)  # what could not be read
                if size > self._budget_bytes:
                    _log.info("not_captured", bytes=size, budget_bytes=self._budget_bytes)
                    return
                self._make_room(size)
                save_cache(path, encode_header(header), cache)
            except (CacheLinkError, OSError) as error:
                _log.warning("not_captured", path=str(path), cache_id=name, error=str(error))
                return
        seconds = round(time.monotonic() - began, 6)
        _log.info("captured", cache_id=name, tokens=len(prefix.ids), bytes=size, seconds=seconds)

    def _make_room(self, nbytes: int) -> None:
        """Removes the files that were unused for longest until ``nbytes`` more fit."""
        files = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                state = path.stat()
                files.append((state.st_mtime_ns, state.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used + nbytes <= self._budget_bytes:
                return
            path.unlink(missing_ok=True)
            used -= size
            _log.info("capture_removed", path=str(path), bytes=size)

    def _remove_torn(self) -> None:
        for path in self.folder.glob(f".*{_SUFFIX}.*"):
            if time.time() - path.stat().st_mtime > _TORN_AFTER_S:
                path.unlink(missing_ok=True)

    def _header(self, prefix: Prefix) -> Header:
        return make_header(
            self._engine,
            prefix.ids,
            NATIVE,
            NO_PACKING,
            sender_epoch=mint_id(),
            block_tokens=self._block_tokens,
            frame=prefix.frame,
        )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def _file_bytes(header: Header) -> int:
    """At least what the file of a cache takes."""
    tensors = 2 * len(header.identity.layers) + 2
    return header.layout.native_bytes + len(encode_header(header)) + _TABLE_BYTES * tensors


__all__ = ["Captures"]
