"""One whole run: payloads, link, processes, rounds."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cachelink_bench.capture import HEADROOM_TOKENS
from cachelink_bench.emulation.namespaces import emulated_link
from cachelink_bench.emulation.probes import echo_s, iperf_gbit
from cachelink_bench.emulation.spec import LinkSpec
from cachelink_bench.emulation.system_commands import check_tools
from cachelink_bench.peers.pair import Site
from cachelink_bench.peers.payload import Size, write_payloads
from cachelink_bench.peers.place import Place
from cachelink_bench.peers.plan import Plan
from cachelink_bench.peers.rounds import Field, Run
from cachelink_bench.peers.rows import Row, make_rows


@dataclass
class Measured:
    """What came out.

    Attributes:
        rows: those that were asked for, in the order of the table.
        sizes: that were measured.
        runs: every run.
        left_out: reasons by name of the row.
        link: what the emulated link really did; empty for loopback.
    """

    rows: list[Row]
    sizes: list[Size]
    runs: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    link: dict[str, object] = field(default_factory=dict)


def run(plan: Plan, say: Callable[[str], None]) -> Measured:
    """Measures; removes every file, process and namespace that it made.

    Args:
        plan: as resolved.
        say: told of progress.

    Raises:
        CacheLinkError: a wrong setting, no root for a link, or the plain socket failed.
    """
    if plan.link:
        check_tools()
    make_rows(plan.rows, plan.planes, "")  # says now if it cannot
    with tempfile.TemporaryDirectory(prefix="cachelink-peers-") as name:
        folder = Path(name)
        say("making the payloads")
        cut = write_payloads(
            folder,
            plan.model,
            plan.sizes,
            base_tokens=plan.base_tokens,
            block_tokens=plan.block_tokens,
        )
        measured = Measured(make_rows(plan.rows, plan.planes, cut.dtype), cut.sizes)
        place = Place(
            module="",
            side="sender",
            host="",
            most_bytes=max(size.payload_bytes for size in cut.sizes),
            token_bytes=cut.token_bytes,
            model=plan.model,
            block_tokens=plan.block_tokens,
            window=max(size.tokens for size in cut.sizes) + HEADROOM_TOKENS,
        )
        with _site(plan.link, folder, measured.link, say) as site:
            _measure(plan, measured, place, site, say)
    return measured


def _measure(
    plan: Plan, measured: Measured, place: Place, site: Site, say: Callable[[str], None]
) -> None:
    order = random.Random(plan.seed)
    field_ = Field(measured.rows, site, place, start_deadline_s=plan.start_deadline_s, say=say)
    with field_:
        field_.start()
        for size, rounds in zip(measured.sizes, plan.rounds, strict=True):
            field_.measure(size, size.stem(site.logs), rounds, order)
    measured.runs, measured.left_out = field_.runs, field_.left_out


@contextmanager
def _site(
    spec: LinkSpec | None, folder: Path, found: dict[str, object], say: Callable[[str], None]
) -> Iterator[Site]:
    """Where the processes run; what the link does is added to ``found``."""
    if spec is None:
        yield Site(None, folder)
        return
    with emulated_link(spec) as link:
        say("measuring the link")
        found |= {
            "rate": spec.rate,
            "delay_s": spec.delay_s,
            "loss_percent": spec.loss_percent,
            "shaper": link.shaper,
            "iperf_before_gbit": iperf_gbit(link),
            "round_trip_s": echo_s(link),
        }
        yield Site(link, folder)
        found["iperf_after_gbit"] = iperf_gbit(link)
