"""The processes of one way: started, let run when it is their turn, stopped when it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.emulation.namespaces import ADDRESSES, EmulatedLink
from cachelink_bench.emulation.namespaces import Side as LinkSide
from cachelink_bench.order_process import OrderProcess
from cachelink_bench.peers.place import Place, Side
from cachelink_bench.peers.rows import Row
from cachelink_core.errors import ConfigError

_LOOPBACK: Final = "127.0.0.1"
_MOST_WORDS: Final = 160
"""Characters of a process's last words in a reason."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where the processes run.

    Attributes:
        link: between them; None for loopback.
        logs: folder for what they print.
    """

    link: EmulatedLink | None
    logs: Path

    def host(self, side: Side) -> str:
        """The address to listen at."""
        return ADDRESSES[_link_side(side)] if self.link else _LOOPBACK

    def within(self, side: Side) -> list[str]:
        """The words before a command on that side."""
        return self.link.within(_link_side(side)) if self.link else []

    def device_bytes(self, pid: int) -> int:
        """Bytes that have gone over the link so far, headers included, as its device counts them.

        Args:
            pid: of a process on the sender's side, whose network it is. On loopback every process
                of this machine adds to it.
        """
        lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="utf-8").splitlines()[2:]
        counts = {name.strip(): list(map(int, rest.split())) for name, _, rest in _split(lines)}
        if self.link is None:
            return counts["lo"][8]
        return sum(count[0] + count[8] for name, count in counts.items() if name != "lo")


class Pair:
    """The processes of one way, connected.

    Attributes:
        sender: its process.
        receiver: its process.
        server: its process, if the way has one.
    """

    def __init__(self, row: Row, site: Site, common: Place, start_deadline_s: float) -> None:
        """Starts them.

        Args:
            row: one of the pair's rows.
            site: where they run.
            common: what all places have in common.
            start_deadline_s: for each process.

        Raises:
            ConfigError: one did not come up; the message says why.
        """
        self._row, self._site, self._deadline_s = row, site, start_deadline_s
        self._started: list[OrderProcess] = []
        place = msgspec.structs.replace(common, module=row.module, options=row.options)
        try:
            self.server = self._start(place, "server") if row.server else None
            if self.server:
                place = msgspec.structs.replace(place, server=self.server.ready["address"])
            self.receiver = self._start(place, "receiver")
            place = msgspec.structs.replace(place, to=self.receiver.ready["address"])
            self.sender = self._start(place, "sender")
        except BaseException:
            self.kill()
            raise
        self.stop()

    @property
    def processes(self) -> Sequence[OrderProcess]:
        """All of them, in the order in which they were started."""
        return self._started

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets them run meanwhile."""
        for process in self._started:
            process.go_on()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Takes them off the processor, connected as they are."""
        for process in reversed(self._started):
            process.stop()

    def close(self) -> None:
        """Ends them in order, the sender first."""
        for process in reversed(self._started):
            process.close()

    def kill(self) -> None:
        """Ends them at once."""
        for process in self._started:
            process.kill()

    def _start(self, place: Place, side: Side) -> OrderProcess:
        place = msgspec.structs.replace(place, side=side, host=self._site.host(side))
        log = self._site.logs / f"{self._row.pair}-{side}.log"
        try:
            process = OrderProcess(
                "cachelink_bench.peers.end",
                [msgspec.json.encode(place).decode()],
                within=self._site.within(side),
                # gRPC would write that a peer which ends has said goodbye.
                environment={"GRPC_VERBOSITY": "ERROR"} | self._row.environment,
                log=log,
                start_deadline_s=self._deadline_s,
            )
        except ConfigError as error:
            raise ConfigError(f"{side}: {error}{_last_words(str(error), log)}") from error
        self._started.append(process)
        return process


def _link_side(side: Side) -> LinkSide:
    """A server stands beside the receiver."""
    return "sender" if side == "sender" else "receiver"


def _split(lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    return (line.partition(":") for line in lines)


def _last_words(reason: str, log: Path) -> str:
    """What a process that ended without a reason of its own printed last."""
    if "ended with status" not in reason:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:_MOST_WORDS]}" if last else ""
