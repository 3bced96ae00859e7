"""A daemon's process keeps freed memory in few pools, whatever its number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachelink_core.node.allocator import ARENAS

ROOT = Path(__file__).parents[2]
SCRIPT = """
import ctypes, sys, threading
from cachelink_core.node.allocator import limit_arenas
print(limit_arenas() if sys.argv[1] == "limited" else "")
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(8)

def allocate():
    together.wait()  # all at once: a pool that is in use makes glibc open another
    for _ in range(2000):
        libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
out = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, out)
libc.fclose(out)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
@pytest.mark.parametrize(("how", "most"), [("limited", ARENAS), ("as it is", None)])
def test_threads_share_the_pools(tmp_path, how, most):
    assert pools(tmp_path / "info", how)[1] <= (most or 64)
    if most is None:
        assert pools(tmp_path / "info", how)[1] > ARENAS


def test_the_operators_own_limit_stays(tmp_path):
    said, count = pools(tmp_path / "info", "limited", MALLOC_ARENA_MAX="1")
    assert said == "False"
    assert count == 1


def pools(info: Path, how: str, **environment: str) -> tuple[str, int]:
    """What ``limit_arenas`` said, and how many pools there are in the end."""
    env = {k: v for k, v in os.environ.items() if k != "MALLOC_ARENA_MAX"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(info)],
        env={**env, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), info.read_text().count("<heap nr=")
