"""``cachelink-bench link``: daemons on an emulated link beside iperf3. What runs needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.emulation.namespaces import SIDES, emulated_link
from cachelink_bench.emulation.spec import LinkSpec, parse_link
from cachelink_bench.emulation.system_commands import run_tool
from cachelink_bench.link.caller import Moved
from cachelink_bench.link.cases import CASES, SMOKE, pick
from cachelink_bench.link.cpu_watch import CpuWatch, process_cpu_s
from cachelink_bench.link.results import make_rows, rows_text
from cachelink_bench.link.rounds import Measured, Round
from cachelink_core.errors import ConfigError
from cachelink_core.limits import MIB
from tests.loopback.test_emulation import needs_link, own

SECONDS = {"grpc": 2.0, "tcp": 1.6, "socket": 1.5}
BYTES = 200_000_000


@pytest.fixture
def clean():
    """After the test nothing is left of this process's links."""
    yield
    assert own(os.getpid()) == []


def measured(load: float) -> Measured:
    """Two rounds of 0.8, 1.0 and about 1.07 Gb/s, between runs of iperf3 of 1.0, 0.8 and 1.0."""
    moved = {
        plane: Moved(seconds, BYTES, 0.1, 0.2, 0.001, 0.05, 0.1, plane)
        for plane, seconds in SECONDS.items()
    }
    rounds = (Round(1.0, 0.8, moved), Round(0.8, 1.0, moved))
    return Measured("tbf", 0.0001, 8142, 0.1, load, rounds)


def test_a_share_is_of_the_mean_of_the_runs_of_iperf3_around_it():
    rows = {row.plane: row for row in make_rows(CASES["1gbit"], measured(0.2))}
    assert rows["grpc"].gbit_per_s.median == pytest.approx(0.8)
    assert rows["grpc"].share.runs == pytest.approx((0.8 / 0.9, 0.8 / 0.9))
    assert rows["tcp"].share.median == pytest.approx(1.0 / 0.9)
    assert rows["tcp"].sender_cpu_s_per_gb.median == pytest.approx(0.25)
    assert rows["tcp"].receiver_cpu_s_per_gb.median == pytest.approx(0.5)


def test_a_verdict_needs_a_quiet_machine_and_a_plain_copy_gets_none():
    quiet = {row.plane: row.verdict for row in make_rows(CASES["1gbit"], measured(0.2))}
    assert quiet == {"grpc": "MISSED", "tcp": "met", "socket": "-"}
    met = {row.plane: row.met for row in make_rows(CASES["1gbit"], measured(0.2))}
    assert met == {"grpc": False, "tcp": True, "socket": None}
    busy = {row.plane: row.verdict for row in make_rows(CASES["1gbit"], measured(0.51))}
    assert busy["grpc"] == busy["tcp"] == "none: NOT QUIET, load 0.51"
    smoke = make_rows(SMOKE, measured(0.2))
    assert smoke[0].verdict == "none: a smoke run"
    assert "| smoke, socket |" in rows_text(smoke)


def test_the_cases_are_those_that_were_promised():
    assert {name: case.target for name, case in CASES.items()} == {
        "1gbit": 0.98, "10gbit": 0.90, "50ms": 0.90,
    }  # fmt: skip
    fast, long = CASES["10gbit"], CASES["50ms"]
    assert fast.link.burst_bytes <= 10**6
    assert fast.rounds >= 7
    assert long.link.delay_s == 0.025
    assert long.link.socket_buffer_bytes >= 32 * MIB


def test_cases_are_picked_by_name():
    assert [case.name for case in pick("50ms,1gbit", 2)] == ["50ms", "1gbit"]
    assert {case.rounds for case in pick("50ms,1gbit", 2)} == {2}
    with pytest.raises(ConfigError, match="--cases has '2gbit'; there are 1gbit"):
        pick("1gbit,2gbit", None)
    with pytest.raises(ConfigError, match="--rounds is 0"):
        pick("1gbit", 0)


def test_cpu_time_counts_from_a_moment_that_is_told_later():
    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    with CpuWatch((os.getpid(),)) as watch:
        work(0.2)
        time.sleep(0.02)
        middle = time.monotonic()
        work(0.1)
    (late,) = watch.since(middle)
    (all_of_it,) = watch.since(0.0)
    assert 0.1 <= late < 0.2
    assert 0.3 <= all_of_it < process_cpu_s(os.getpid())


def test_a_bucket_can_be_limited():
    spec = LinkSpec("10gbit", 10**10, most_burst_bytes=10**6)
    assert spec.burst_bytes == 10**6
    assert LinkSpec("1gbit", 10**9, most_burst_bytes=10**6).burst_bytes == 250_000
    assert parse_link("10gbit").burst_bytes == 2_500_000


@needs_link
def test_socket_buffers_are_raised_within_the_link_only(clean):
    before = run_tool("cat", "/proc/sys/net/ipv4/tcp_rmem")
    with emulated_link(LinkSpec("1gbit", 10**9, socket_buffer_bytes=32 * MIB)) as link:
        for side in SIDES:
            for name in ("tcp_rmem", "tcp_wmem"):
                shown = run_tool(*link.within(side), "cat", f"/proc/sys/net/ipv4/{name}")
                assert int(shown.split()[-1]) == 32 * MIB
        assert run_tool("cat", "/proc/sys/net/ipv4/tcp_rmem") == before


@pytest.mark.slow
@needs_link
def test_a_smoke_run_moves_a_cache_by_both_planes(clean, tmp_path, capsys):
    out, page = tmp_path / "link.json", tmp_path / "link.md"
    places = ("--json", str(out), "--markdown", str(page))
    assert bench.main(["link", "--smoke", *places]) == 0
    document = json.loads(out.read_text())
    (case,) = document["cases"].values()
    (moved,) = [each["moved"] for each in case["rounds"]]
    assert {name: one["plane"] for name, one in moved.items()} == {
        "grpc": "grpc", "tcp": "tcp", "socket": "socket",
    }  # fmt: skip
    assert len({one["payload_bytes"] for one in moved.values()}) == 1
    for row in document["rows"]:
        # A link of 100 Mb/s gives no more but for what its bucket held: 8 % of this cache.
        assert 0.01 < row["gbit_per_s"]["median"] < 0.12
    assert moved["grpc"]["allocate_s"] > 0
    assert moved["tcp"]["receiver_cpu_s"] > 0
    assert str(tmp_path) not in out.read_text()
    assert document["command"] == "cachelink-bench link --smoke"
    shown = capsys.readouterr().out
    assert "| smoke, tcp" in shown
    head = f"# Link\n\n{document['date']}, `{document['command']}`\n\n"
    assert page.read_text() == head + shown


@pytest.mark.slow
@needs_link
def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path):
    parts = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-m", "cachelink_bench", "link", "--smoke"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": parts, "TMPDIR": str(tmp_path)},
    ) as run:  # fmt: skip
        try:
            while "warming up" not in (line := run.stderr.readline()):
                assert line, "it ended before"
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
            assert run.stderr.read() == "cachelink-bench link: interrupted\n"
            assert run.wait(30) == 130
        finally:
            run.kill()
    assert own(run.pid) == []
    assert list(tmp_path.glob("cachelink-*")) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
    assert bench.main(["link", "--markdown", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"cachelink-bench link: {tmp_path} cannot be written: Is a directory"


def test_a_wrong_option_is_one_line(capsys):
    assert bench.main(["link", "--planes", "grpc,rdma"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "cachelink-bench link: --planes has 'rdma'; there are grpc, tcp"
