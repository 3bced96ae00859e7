"""``cachelink-bench``: one name for every benchmark; each is imported only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from cachelink_core.errors import CacheLinkError

BENCHMARKS: Final = {
    "codecs": "bytes, divergence and speed of every codec on a real model's cache",
    "codec-speed": "encode and decode a core, eager and compiled, beside memcpy and a 10 Gb/s link",
    "transport": "what mapping a token costs, beside the bare GEMMs inside it",
    "latency": "translating a ready cache beside reading the prefix again, to the first token",
    "answer": "answers from a cache that lies ready, alone and several at once",
    "loopback": "a handoff between two processes, beside bare gRPC and a raw socket",
    "pipeline": "the next document always under way, beside one call after the other",
    "two-node": "caches moved to another node, real or emulated, beside sending the text",
    "overlap": "handoffs while the prefix is prefilled, beside each stage alone and in turn",
    "link": "how much of an emulated link a handoff fills, beside iperf3 in the same run",
    "memory": "peak memory of both daemons during a handoff, above models and caches",
    "peers": "the same cache bytes beside Mooncake, NIXL, LMCache and plain sockets",
    "planner": "every way timed on emulated links, beside what the planner picks",
    "break-even": "figures of a two-node result: when moving beats re-reading, and after how often",
}
"""Name, which with ``_`` for ``-`` is the module's, and what it does. Each module has
``main(argv) -> int``."""

FAILED: Final = 1
INTERRUPTED: Final = 130

_USAGE: Final = "usage: cachelink-bench BENCHMARK [OPTION]...\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the first argument names.

    Args:
        argv: arguments, those of the process by default.

    Returns:
        The benchmark's exit status; 1 for an error of ours, which is one line on standard error; 2 for
        a name that does not exist; 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (["-h"], ["--help"]):
        print(_help())
        return 0
    if not given or given[0] not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        named = repr(given[0]) if given else "nothing"
        print(f"{_USAGE}cachelink-bench: {named} is not one of {known}", file=sys.stderr)
        return 2
    try:
        module = import_module(f"cachelink_bench.{given[0].replace('-', '_')}")
        run: Callable[[Sequence[str]], int] = module.main
        return run(given[1:])
    except CacheLinkError as error:
        print(f"cachelink-bench {given[0]}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:  # loading torch alone takes seconds
        print(f"cachelink-bench {given[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _help() -> str:
    lines = [f"  {name:12s} {what}" for name, what in BENCHMARKS.items()]
    return "\n".join(
        (_USAGE, __doc__ or "", "", *lines, "", "Options of one: cachelink-bench NAME --help")
    )


if __name__ == "__main__":
    raise SystemExit(main())
