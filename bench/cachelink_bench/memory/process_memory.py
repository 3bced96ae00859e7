"""The memory of another process, as Linux counts it: all of it, libraries included."""

from __future__ import annotations

from pathlib import Path

from cachelink_core.errors import ConfigError


class ProcessMemory:
    """Resident memory of one process, and its peak since it was last reset."""

    def __init__(self, pid: int) -> None:
        """Looks at a process of the same user.

        Raises:
            ConfigError: the system does not say, or does not allow the reset.
        """
        self._folder = Path("/proc") / str(pid)
        self.reset_peak()

    def resident_bytes(self) -> int:
        """Pages that are in memory now."""
        return self._field("smaps_rollup", "Rss:")

    def peak_bytes(self) -> int:
        """The most pages that were in memory at once since ``reset_peak``."""
        return self._field("status", "VmHWM:")

    def reset_peak(self) -> None:
        """Makes the present the peak.

        Raises:
            ConfigError: not on this system.
        """
        try:
            (self._folder / "clear_refs").write_text("5", encoding="ascii")
        except OSError as error:
            raise ConfigError(
                f"the peak of a process cannot be reset here: {error}; it needs Linux with "
                f"/proc/PID/clear_refs"
            ) from error

    def _field(self, file: str, name: str) -> int:
        try:
            lines = (self._folder / file).read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise ConfigError(f"/proc/PID/{file} cannot be read here: {error}") from error
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise ConfigError(f"/proc/PID/{file} has no {name}")


__all__ = ["ProcessMemory"]
