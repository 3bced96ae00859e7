"""What one run gave, and the file that keeps every run, so that an interrupted benchmark goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from cachelink_core.errors import ConfigError

FORMAT: Final = "cachelink-two-node-2"
"""Raised when a run or a result file means something else."""

PREFILL: Final = "prefill"
"""Representation of a run that reads the document at the sender and moves nothing."""

Key = tuple[str, int, int, str, str]


class Run(msgspec.Struct, frozen=True):
    """One run. Seconds; each phase is on one clock, and no two clocks are subtracted.

    Attributes:
        context: class of the document.
        document: its number.
        repeat: from 0.
        representation: ``text``, a codec, or ``PREFILL``.
        mode: of the nodes; empty for a text, which does not depend on it.
        tokens: of the prefix.
        payload_bytes: sent for it: of the cache as packed, or of the text in UTF-8.
        handoff: phases of the receipt, empty for a text.
        answer: phases of the answer on the receiver's clock.
        first_token_s: the client's clock, from the request to the first token.
        round_trip_s: the same to the last token.
        ids: of the answer.
        earlier: when a prefill was measured whose cache was captured on disk; empty for now.
    """

    context: str
    document: int
    repeat: int
    representation: str
    mode: str
    tokens: int
    payload_bytes: int = 0
    handoff: dict[str, float] = {}
    answer: dict[str, float] = {}
    first_token_s: float = 0.0
    round_trip_s: float = 0.0
    ids: tuple[int, ...] = ()
    earlier: str = ""

    @property
    def key(self) -> Key:
        """What it measured."""
        return self.context, self.document, self.repeat, self.representation, self.mode


class _Begin(msgspec.Struct, frozen=True):
    """First line of the file.

    Attributes:
        format: of the lines.
        config: as resolved; runs of another configuration must not follow.
    """

    format: str
    config: dict[str, object]


class RunLog:
    """A file of runs, one line each, on disk as soon as it was measured.

    Attributes:
        path: of the file.
        runs: all of them, those of an earlier start first.
    """

    def __init__(self, path: Path, config: dict[str, object], *, resume: bool) -> None:
        """Goes on with a file, or begins one; it is there once it has a run.

        Args:
            path: of the file.
            config: as resolved, plain data.
            resume: go on with what is there.

        Raises:
            ConfigError: there are runs already and ``resume`` is not given, they are of another
                configuration or version, the file cannot be read, or none can be written there.
        """
        self.path = path
        self.runs: list[Run] = []
        # As it comes back from the file: tuples become lists.
        wanted: dict[str, object] = msgspec.json.decode(msgspec.json.encode(config))
        self._begin = msgspec.json.encode(_Begin(FORMAT, wanted)) + b"\n"
        _check_place(path.parent)
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            if len(lines) > 1:
                self._go_on(lines, wanted, resume=resume)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error

    @property
    def done(self) -> set[Key]:
        """Keys of what was measured."""
        return {run.key for run in self.runs}

    def add(self, run: Run) -> None:
        """Keeps one run; the first one makes the file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            if not self.runs:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_bytes(self._begin)
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(run) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        self.runs.append(run)

    def _go_on(self, lines: list[bytes], wanted: dict[str, object], *, resume: bool) -> None:
        *whole, torn = lines
        begin, runs = _decode(self.path, whole)
        if not resume:
            raise ConfigError(f"{self.path} has {len(runs)} runs; --resume goes on with them")
        _check_same(self.path, begin.config, wanted)
        self.runs = runs
        if torn:  # a run that was being written when the process was killed
            self.path.write_bytes(b"".join(line + b"\n" for line in whole))


def _check_place(folder: Path) -> None:
    """Finds out now whether a folder could be made, without making it."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written" if there.is_dir() else "is no folder"
        raise ConfigError(f"--out is {str(folder)!r}: {str(there)!r} {what}")


def _decode(path: Path, lines: Iterable[bytes]) -> tuple[_Begin, list[Run]]:
    first, *rest = lines
    try:
        begin = msgspec.json.decode(first, type=_Begin)
        if begin.format == FORMAT:
            return begin, [msgspec.json.decode(line, type=Run) for line in rest]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} does not hold runs of this benchmark: {error}") from error
    raise ConfigError(f"{path}: format is {begin.format!r}; this version has {FORMAT!r}")


def _check_same(path: Path, held: dict[str, object], wanted: dict[str, object]) -> None:
    for name in sorted(held.keys() | wanted.keys()):
        if held.get(name) != wanted.get(name):
            raise ConfigError(
                f"{path}: its runs have {name} {held.get(name)!r}, this run {wanted.get(name)!r}"
            )
