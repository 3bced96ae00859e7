"""Takes every way in turn, between two runs of the plain socket each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from cachelink_bench.peers.pair import Pair, Site
from cachelink_bench.peers.payload import Size
from cachelink_bench.peers.place import Place
from cachelink_bench.peers.rows import SOCKET, Row
from cachelink_core.errors import ConfigError

_ORDER_S: Final = 60.0
_WARM_UP: Final = -1


class Run(msgspec.Struct, frozen=True):
    """One run of one row.

    Attributes:
        row: its key.
        mib: of the size.
        round: its number; -1 for the warm-up.
        wall_s: the sender's first action → the receiver's word that all is verified and in place.
        before_s: of the plain socket just before; 0 for a run of that itself.
        after_s: of the plain socket just after.
        sender_cpu_s: user and system seconds of the sending process meanwhile.
        receiver_cpu_s: of the receiving one.
        server_cpu_s: of the server, if there is one.
        payload_bytes: that the way was given, or made, to send.
        device_bytes: that went over the link, headers and all.
        verified: the receiver's word.
        right: whether what lay there afterwards was what was sent.
    """

    row: str
    mib: float
    round: int
    wall_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    server_cpu_s: float
    payload_bytes: int
    device_bytes: int
    verified: bool
    right: bool
    before_s: float = 0.0
    after_s: float = 0.0


class Field:
    """All pairs, and what they did; a context manager that ends their processes.

    Attributes:
        rows: that still take part, by key.
        left_out: the others' reasons, by name.
        runs: all, warm-ups left out.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        site: Site,
        place: Place,
        *,
        start_deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            rows: beside the plain socket.
            site: where the processes run.
            place: what all of them are told.
            start_deadline_s: for each process.
            say: told of progress.
        """
        self.rows = {row.key: row for row in rows}
        self.left_out: dict[str, str] = {}
        self.runs: list[Run] = []
        self._site, self._place = site, place
        self._start_deadline_s, self._say = start_deadline_s, say
        self._pairs: dict[str, Pair] = {}
        self._count = 0

    def start(self) -> None:
        """Starts every pair; one that does not come up leaves its rows out.

        Raises:
            ConfigError: the plain socket's did not.
        """
        for row in (SOCKET, *self.rows.values()):
            if row.pair in self._pairs:
                continue
            self._say(f"starting: {row.name}")
            try:
                self._pairs[row.pair] = Pair(row, self._site, self._place, self._start_deadline_s)
            except ConfigError as error:
                if row is SOCKET:
                    raise
                self._leave_out([r for r in self.rows.values() if r.pair == row.pair], error)

    def measure(self, size: Size, stem: Path, rounds: int, order: random.Random) -> None:
        """Warms every row up, then measures it ``rounds`` times.

        Raises:
            ConfigError: the plain socket failed.
        """
        loaded = set[str]()
        for row in (SOCKET, *self.rows.values()):
            with self._excused(row):
                if row.pair not in loaded:
                    self._load(row, stem)
                    loaded.add(row.pair)
                self._run(row, size, _WARM_UP)
        for number in range(rounds):
            self._say(f"{size.mib:g} MiB, round {number + 1} of {rounds}")
            shuffled = list(self.rows.values())
            order.shuffle(shuffled)
            before = self._run(SOCKET, size, number)
            self.runs.append(before)
            for row in shuffled:
                run = None
                with self._excused(row):
                    run = self._run(row, size, number)
                after = self._run(SOCKET, size, number)
                if run is not None:
                    self.runs.append(
                        msgspec.structs.replace(run, before_s=before.wall_s, after_s=after.wall_s)
                    )
                self.runs.append(after)
                before = after

    def close(self) -> None:
        """Ends every process in order."""
        for pair in self._pairs.values():
            pair.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
            return
        for pair in self._pairs.values():
            pair.kill()

    def _load(self, row: Row, stem: Path) -> None:
        pair = self._pairs[row.pair]
        with pair.turn():
            pair.sender.ask(do="load", stem=str(stem), deadline_s=_ORDER_S)

    def _run(self, row: Row, size: Size, number: int) -> Run:
        """One run, checked.

        Raises:
            ConfigError: a process ended, was silent, or says that it failed.
        """
        self._count += 1
        pair = self._pairs[row.pair]
        with pair.turn():
            prepared = pair.sender.ask(do="prepare", run=self._count, options=row.options)
            pair.receiver.ask(do="expect", prepared=prepared, options=row.options)
            spent = _Spent(pair, self._site)
            sent = pair.sender.ask(do="send")
            used = spent.since()
            digest = pair.receiver.ask(do="found", name=sent["name"])["digest"]
        return Run(
            row=row.key,
            mib=size.mib,
            round=number,
            wall_s=sent["wall_s"],
            payload_bytes=prepared["payload_bytes"],
            verified=sent["verified"],
            right=digest == prepared["digest"],
            **used,
        )

    @contextmanager
    def _excused(self, row: Row) -> Iterator[None]:
        """Leaves a row out when it fails; the rest goes on without it."""
        if row is SOCKET:
            yield
            return
        try:
            yield
        except ConfigError as error:
            self._leave_out([row], error)

    def _leave_out(self, rows: Sequence[Row], error: ConfigError) -> None:
        for row in rows:
            self.rows.pop(row.key, None)
            self.left_out[row.name] = str(error)
            self._say(f"left out: {row.name}: {error}")


class _Spent:
    """CPU seconds and bytes on the link since it was made."""

    def __init__(self, pair: Pair, site: Site) -> None:
        self._pair, self._site = pair, site
        self._began = self._now()

    def since(self) -> dict[str, Any]:
        return {key: now - self._began[key] for key, now in self._now().items()}

    def _now(self) -> dict[str, Any]:
        pair = self._pair
        return {
            "sender_cpu_s": pair.sender.cpu_s(),
            "receiver_cpu_s": pair.receiver.cpu_s(),
            "server_cpu_s": pair.server.cpu_s() if pair.server else 0.0,
            "device_bytes": self._site.device_bytes(pair.sender.pid),
        }
