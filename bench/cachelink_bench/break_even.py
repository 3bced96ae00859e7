"""``cachelink-bench break-even``: the figures of a two-node result.

The first: measured round trips against context, and computed transfer times against the receiver's
prefill, with the crossings. The second: what a question costs when N are asked about one document.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cachelink_bench.break_even_model import FAST_GBIT, BreakEven, break_even
from cachelink_bench.report import table
from cachelink_bench.two_node.results import Results, read_results
from cachelink_bench.two_node.tables import label
from cachelink_core.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Draws the figures and prints the crossings.

    Returns:
        0; 2 for wrong arguments.

    Raises:
        ConfigError: no such result, or the figures cannot be written.
    """
    options = _parse(argv)
    _run(options.results, options.out or options.results.parent)
    return 0


def crossings_text(results: Results, found: BreakEven) -> str:
    """The numbers behind the figures, as a table."""
    rates = (found.gbit_per_s, FAST_GBIT)
    header = (
        "representation", "fixed ms", "bytes/token",
        *(f"wins from, {rate:.3g} Gb/s" for rate in rates),
        f"break-even N at {found.context}", "pays from",
    )  # fmt: skip
    body = []
    for name, line in found.lines.items():
        at = [line.crossing(found.prefill, rate) for rate in rates]
        item = found.amortised.get(name)
        body.append(
            (
                label(name, results),
                f"{line.fixed_s * 1e3:.1f}",
                f"{line.token_bytes:.0f}",
                *("never" if n is None else f"{n:.1f} tokens" for n in at),
                "–" if item is None else f"{item.break_even:.3f}",
                "–" if item is None else str(item.pays_from),
            )
        )
    return table(header, body)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cachelink-bench break-even", description=__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="of two-node")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: beside the results")
    return parser.parse_args(argv)


def _run(path: Path, out: Path) -> None:
    results = read_results(path).comparable()
    found = break_even(results)
    try:
        from cachelink_bench.break_even_figures import draw_amortised, draw_break_even
    except ImportError as error:
        raise ConfigError(
            f"figures need matplotlib: pip install 'cachelink[bench]' ({error})"
        ) from (error)
    print(crossings_text(results, found))
    for draw, suffix in ((draw_break_even, "break-even"), (draw_amortised, "amortised")):
        for written in draw(results, found, out / f"{path.stem}-{suffix}"):
            print(written)
