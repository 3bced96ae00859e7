"""A pass that several processes share gives the moments of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachelink_core.fit.build import SolveOptions, build_mapper
from cachelink_core.fit.measurement import load_measurement

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("shard_worker.py")


def run(out, sequences, processes):
    """Runs the worker under torchrun; one process runs alone, as without torchrun."""
    command = [sys.executable, str(WORKER), str(out), str(sequences)]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command[1:1] = launcher
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_measurement(out)


# 10 sequences are 3 chunks and 1 held out: uneven over 2 and 4; 3 sequences leave 2 of 4 empty.
@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "worlds"), [(10, (2, 4)), (3, (4,))])
def test_any_number_of_processes_gives_one_result(sequences, worlds, tmp_path):
    alone = run(tmp_path / "1", sequences, 1)
    options = SolveOptions(k=1, lambda_mode="relative", lambda_value=1e-3)
    expected = build_mapper(alone, options)
    for world in worlds:
        shared = run(tmp_path / str(world), sequences, world)
        assert shared.shard == (0, world)
        assert shared.moments.counts == alone.moments.counts
        for key, sums in alone.moments.sums.items():
            for (name, ours), (_, theirs) in zip(
                shared.moments.sums[key].named(), sums.named(), strict=True
            ):
                assert (ours - theirs).norm() <= 1e-12 * theirs.norm(), (key, name)
        found = build_mapper(shared, options)
        for ours, theirs in zip(found.card.layers, expected.card.layers, strict=True):
            assert ours.sources == theirs.sources
            for a, b in ((ours.key, theirs.key), (ours.value, theirs.value)):
                assert a.r2_in_sample == pytest.approx(b.r2_in_sample, abs=1e-9)
                assert a.r2_held_out == pytest.approx(b.r2_held_out, abs=1e-9)
