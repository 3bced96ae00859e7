"""The demonstration's result: a table for people, one document for programs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from cachelink_core.cli.demo.checks import Check
from cachelink_core.cli.demo.plan import RE_READ, Plan
from cachelink_core.cli.demo.rows import Row
from cachelink_core.cli.versions import versions
from cachelink_core.identity import ModelIdentity


@dataclass(frozen=True, slots=True)
class Report:
    """One whole run.

    Attributes:
        plan: what was done.
        identity: of the model on both nodes.
        rows: one of each arm.
        checks: every claim.
        started_s: until both nodes were ready.
        total_s: all of it.
    """

    plan: Plan
    identity: ModelIdentity
    rows: list[Row]
    checks: list[Check]
    started_s: float
    total_s: float

    @property
    def reference(self) -> Row:
        """The re-read."""
        return next(row for row in self.rows if row.arm == RE_READ)

    @property
    def broken(self) -> list[Check]:
        """Claims that do not hold."""
        return [check for check in self.checks if not check.ok]

    def document(self) -> dict[str, object]:
        """All of it as one JSON value."""
        return {
            "ok": not self.broken,
            "versions": versions(),
            "machine": {
                "system": platform.system(),
                "processor": platform.machine(),
                "cpus": os.cpu_count(),
            },
            "config": {
                "model": self.plan.model,
                "identity_digest": self.identity.digest(),
                "architecture": self.identity.architecture,
                "dtype": self.identity.dtype,
                "document": self.plan.title,
                "document_chars": len(self.plan.document),
                "question": self.plan.question,
                "expected": self.plan.expected,
                "tokens": self.plan.tokens,
                "threads": self.plan.threads,
            },
            "rows": [row.document(self.reference) for row in self.rows],
            "checks": self.checks,
            "started_s": self.started_s,
            "total_s": self.total_s,
        }

    def show(self, out: Console) -> None:
        """Prints the table, the answers and what the columns mean."""
        out.width = max(out.width, _TABLE_COLUMNS)
        out.print(self._table())
        out.print(_LEGEND.format(tokens=self.plan.tokens))
        out.print(f"\n{self.plan.question}")
        for row in self.rows:
            out.print(f"  {row.arm:<12} {' '.join(row.said.answer.split()) or '(nothing)'}")
        held = len(self.checks) - len(self.broken)
        out.print(f"\n{held} of {len(self.checks)} checks hold; {self.total_s:.0f} s in all.")

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("arm", no_wrap=True)
        for name in _NUMBERS:
            table.add_column(name, justify="right")
        table.add_column("path")
        table.add_column("same")
        for row in self.rows:
            table.add_row(row.arm, *_numbers(row), row.path, self._same(row))
        return table

    def _same(self, row: Row) -> str:
        if row is self.reference:
            return "-"
        if row.equals(self.reference):
            return "yes"
        return f"first {row.same_tokens(self.reference)}"


_TABLE_COLUMNS: Final = 104
"""A narrower terminal breaks lines itself, which is easier to read than folded cells."""

_LEGEND: Final = """
Times in seconds. prefill: the node that read the document; the codecs share one prefill.
send: the sender's clock. load (exposed), load busy, install, query prefill and first token: the
receiver's. round trip: this client's, from the request to the last token; * with the prefill in it.
same: all {tokens} tokens are those of the re-read, or so many of the first ones are.
zeroed: a right manifest with nothing but zeros behind it; a path is what the sender claims."""

_NUMBERS: Final = (
    "wire\nMB",
    "of\nbf16",
    "prefill",
    "send",
    "load",
    "load\nbusy",
    "install",
    "query\nprefill",
    "first\ntoken",
    "round\ntrip",
)


def _numbers(row: Row) -> list[str]:
    size = f"{row.wire_bytes / 1e6:.2f}" if row.wire_bytes else "-"
    ratio = f"{row.ratio:.3f}" if row.wire_bytes else "-"
    times = (row.prefill_s, row.send_s, row.load_s, row.load_busy_s, row.install_s)
    answer = (row.query_prefill_s, row.first_token_s)
    round_trip = f"{row.round_trip_s:.2f}{'*' if row.cold else ' '}"
    return [
        size,
        ratio,
        *("-" if time_s is None else f"{time_s:.3f}" for time_s in (*times, *answer)),
        round_trip,
    ]
