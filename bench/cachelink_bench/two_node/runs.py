"""What one run gave, and the file that keeps every run, so that an interrupted benchmark goes on."""

from __future__ import annotations

import os
from collections import Counter
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


class Session(msgspec.Struct, frozen=True):
    """One start of the benchmark, and the conditions in which it measured.

    Attributes:
        began: UTC, to the second; no other session of a log has the same.
        command: as it was given.
        load_average: of the measuring machine then.
        note: of whoever ran it.
        iperf_before_gbit: from sender to receiver before the runs; None without an emulated link.
        iperf_after_gbit: the same after them; None also if the session was interrupted.
        runs: that it measured, counted when a log is read.
    """

    began: str
    command: str
    load_average: float
    note: str = ""
    iperf_before_gbit: float | None = None
    iperf_after_gbit: float | None = None
    runs: int = 0


class _SessionLine(msgspec.Struct, frozen=True):
    """A line before the first run of a session, and after its last one with what is known then."""

    session: Session


_SESSION_LINE: Final = b'{"session":'


class RunLog:
    """A file of runs, one line each, on disk as soon as it was measured.

    Attributes:
        path: of the file.
        runs: all of them, those of an earlier start first.
        sessions: by their begin; a log of an older version has runs before the first one.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, object],
        *,
        resume: bool,
        session: Session | None = None,
    ) -> None:
        """Goes on with a file, or begins one; it is there once it has a run.

        Args:
            path: of the file.
            config: as resolved, plain data.
            resume: go on with what is there.
            session: of the runs to come.

        Raises:
            ConfigError: there are runs already and ``resume`` is not given, they are of another
                configuration or version, the file cannot be read, or none can be written there.
        """
        self.path = path
        self.runs: list[Run] = []
        self.sessions: dict[str, Session] = {}
        self._session = session
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
        """Keys of what was measured; a prefill without its time was not."""
        return {run.key for run in self.runs if run.representation != PREFILL or run.handoff}

    def add(self, run: Run) -> None:
        """Keeps one run; the first one makes the file, and the session's first one names it.

        Raises:
            ConfigError: it cannot be written.
        """
        session = self._session
        if session is None or session.began in self.sessions:
            self._append(run)
        else:
            self._append(_SessionLine(session), run)
            self.sessions[session.began] = session
        self.runs.append(run)

    def end_session(self, began: str, iperf_after_gbit: float) -> None:
        """Adds what is known at a session's end; nothing if it has measured no run.

        Raises:
            ConfigError: it cannot be written.
        """
        session = self.sessions.get(began)
        if session is not None:
            ended = msgspec.structs.replace(session, iperf_after_gbit=iperf_after_gbit)
            self._append(_SessionLine(msgspec.structs.replace(ended, runs=0)))
            self.sessions[began] = ended

    def _append(self, *items: Run | _SessionLine) -> None:
        try:
            if not self.runs and not self.sessions:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_bytes(self._begin)
            with self.path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(item) + b"\n" for item in items))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error

    def _go_on(self, lines: list[bytes], wanted: dict[str, object], *, resume: bool) -> None:
        *whole, torn = lines
        begin, (runs, sessions) = _decode(self.path, whole)
        if not resume:
            raise ConfigError(f"{self.path} has {len(runs)} runs; --resume goes on with them")
        _check_same(self.path, begin.config, wanted)
        self.runs, self.sessions = runs, sessions
        if torn:  # a run that was being written when the process was killed
            self.path.write_bytes(b"".join(line + b"\n" for line in whole))


def _check_place(folder: Path) -> None:
    """Finds out now whether a folder could be made, without making it."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written" if there.is_dir() else "is no folder"
        raise ConfigError(f"--out is {str(folder)!r}: {str(there)!r} {what}")


def _decode(
    path: Path, lines: Iterable[bytes]
) -> tuple[_Begin, tuple[list[Run], dict[str, Session]]]:
    first, *rest = lines
    try:
        begin = msgspec.json.decode(first, type=_Begin)
        if begin.format == FORMAT:
            return begin, _runs_and_sessions(rest)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} does not hold runs of this benchmark: {error}") from error
    raise ConfigError(f"{path}: format is {begin.format!r}; this version has {FORMAT!r}")


def _runs_and_sessions(lines: Iterable[bytes]) -> tuple[list[Run], dict[str, Session]]:
    """A run belongs to the session whose line is the last one before it."""
    runs: list[Run] = []
    sessions: dict[str, Session] = {}
    counts: Counter[str] = Counter()
    began = ""
    for line in lines:
        if line.startswith(_SESSION_LINE):
            session = msgspec.json.decode(line, type=_SessionLine).session
            began = session.began
            sessions[began] = session
        else:
            runs.append(msgspec.json.decode(line, type=Run))
            counts[began] += 1
    counted = {
        began: msgspec.structs.replace(session, runs=counts[began])
        for began, session in sessions.items()
    }
    return runs, counted


def _check_same(path: Path, held: dict[str, object], wanted: dict[str, object]) -> None:
    for name in sorted(held.keys() | wanted.keys()):
        if held.get(name) != wanted.get(name):
            raise ConfigError(
                f"{path}: its runs have {name} {held.get(name)!r}, this run {wanted.get(name)!r}"
            )
