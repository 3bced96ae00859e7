"""``cachelink demo --pair recall`` with the committed pair: a cross-model handoff end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    roots = [str(ROOT / part) for part in ("", "sender", "receiver")]
    return subprocess.run(
        [sys.executable, "-m", "cachelink_core.cli", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_ridge_fails_and_the_residual_recovers():
    done = run("--pair", "recall", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [check for check in found["checks"] if not check["holds"]] == []
    cells = {(row["arm"], row["facts"]): row for row in found["rows"]}
    for facts in (8, 16, 32):
        assert cells["native receiver", facts]["recall"] >= 0.95
        assert cells["native sender", facts]["recall"] >= 0.95
        assert cells["ridge", facts]["recall"] < 0.2
        assert cells["cachelink", facts]["recall"] > 0.9
        assert cells["cachelink", facts]["kl"] < 0.1 * cells["ridge", facts]["kl"]
        for arm in ("another document", "zeroed"):
            assert cells[arm, facts]["recall"] < 0.2
    assert "gate FAILED" in found["reasons"]["ridge"]
    assert "gate passed" in found["reasons"]["cachelink"]


def test_a_pair_that_is_not_there_is_one_clear_line():
    done = run("--pair", "nobody")
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "nobody" in done.stderr
