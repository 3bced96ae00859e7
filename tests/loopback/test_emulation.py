"""Two hosts on this machine: the link is what it says, and nothing of it stays. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.emulation.namespaces import (
    ADDRESSES,
    SIDES,
    emulated_link,
    has_netem,
    leftovers,
    remove_namespace,
)
from cachelink_bench.emulation.probes import echo_s, iperf_gbit
from cachelink_bench.emulation.spec import LinkSpec, parse_link
from cachelink_bench.emulation.system_commands import run_tool, try_tool
from cachelink_bench.two_node.results import read_results
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError, InternalError
from cachelink_core.testing.tiny_models import save_tiny

ROOT = Path(__file__).parents[2]
START_S = 120.0


def why_not() -> str:
    """Why no link can be emulated here; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "iperf3") if shutil.which(tool) is None]
    if missing:
        return f"not installed (Debian: iproute2, iperf3): {', '.join(missing)}"
    probe = f"cachelink-probe-{os.getpid()}"
    done = try_tool(["ip", "netns", "add", probe])
    if done.returncode:
        return f"root may not make network namespaces here: {done.stderr.strip()}"
    run_tool("ip", "netns", "delete", probe)
    return ""


REASON = why_not()
needs_link = pytest.mark.skipif(bool(REASON), reason=REASON or "it can be emulated")


def own(pid: int) -> list[str]:
    """Namespaces that a process made and left."""
    return [name for name in leftovers() if f"-{pid}-" in name]


@pytest.fixture
def clean():
    """After the test nothing is left of this process's links."""
    yield
    assert own(os.getpid()) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation") / "model"
    save_tiny("llama", folder)
    load_engine(str(folder), device="cpu")  # so that the daemons find its digest
    return folder


@needs_link
@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_a_link_carries_its_rate_and_no_more(clean, rate):
    spec = parse_link(rate)
    with emulated_link(spec) as link:
        assert sorted(link.namespaces.values()) == sorted(own(os.getpid()))
        found_gbit = iperf_gbit(link, seconds=1)
        wanted_gbit = spec.rate_bits / 1e9
        # Above the rate by what the bucket held at the start; below it by headers, and when the
        # machine is busy.
        assert 0.5 * wanted_gbit < found_gbit < 1.1 * wanted_gbit
        assert echo_s(link) < 0.05
        for side in SIDES:
            shown = run_tool(*link.within(side), "ip", "-brief", "address")
            assert ADDRESSES[side] in shown
    assert ADDRESSES["sender"] not in run_tool("ip", "-brief", "address")


@needs_link
def test_a_delay_is_added_each_way(clean):
    with emulated_link(parse_link("1gbit", "20ms")) as link:
        assert 0.04 <= echo_s(link) < 0.06
        assert "netem" in link.shaper or "TUN" in link.shaper


@needs_link
def test_packets_are_lost_where_the_kernel_can_and_it_is_refused_where_not(clean):
    with emulated_link(parse_link("1gbit")) as link:
        able = has_netem(link.namespaces["sender"])
    if able:
        with emulated_link(parse_link("1gbit", "0s", "5%")) as link:
            sent = [*link.within("sender"), "ping", "-q", "-i", "0.002", "-c", "500"]
            said = _run([*sent, ADDRESSES["receiver"]]).stdout
            assert " 0% packet loss" not in said
        return
    wanted = emulated_link(parse_link("1gbit", "0s", "5%"))
    with pytest.raises(ConfigError, match="--loss needs netem"), wanted:
        raise AssertionError("there is no such link")


@needs_link
def test_what_runs_on_a_link_ends_with_it(clean):
    def fail():
        with emulated_link(parse_link("10mbit")) as link:
            child = subprocess.Popen([*link.within("receiver"), "sleep", "60"])
            children.append(child)
            while not run_tool("ip", "netns", "pids", link.namespaces["receiver"]).split():
                time.sleep(0.01)
            raise InternalError("as something fails")

    children: list[subprocess.Popen[bytes]] = []
    with pytest.raises(InternalError, match="as something fails"):
        fail()
    assert children[0].wait(5) == -signal.SIGKILL


@needs_link
def test_a_link_that_cannot_be_made_leaves_nothing(clean):
    spec = LinkSpec("odd", rate_bits=0)
    with pytest.raises(InternalError, match="tc -n "), emulated_link(spec):
        raise AssertionError("there is no link of no rate")


@pytest.mark.slow
@needs_link
def test_the_benchmark_runs_between_two_emulated_hosts(clean, model, tmp_path):
    argv = ["--emulate", "100mbit", "--model", str(model), "--contexts", "1k", "--documents", "1"]
    argv += ["--representations", "text,native,int4", "--repeats", "2", "--decode", "4"]
    argv += ["--serial", "--threads", "1", "--out", str(tmp_path)]
    argv += ["--capture-dir", str(tmp_path / "captures")]
    assert bench.main(["two-node", *argv]) == 0
    results = read_results(tmp_path / "two-node.json")
    assert results.link is not None
    assert 0.05 < results.link.iperf_before_gbit < 0.11
    assert 0.05 < results.link.iperf_after_gbit < 0.11
    (session,) = results.sessions
    assert session.runs == len(results.runs)
    assert session.load_average == results.load_average
    assert session.iperf_before_gbit == results.link.iperf_before_gbit
    assert session.iperf_after_gbit == results.link.iperf_after_gbit
    # Each kind of sender prefilled by itself: neither read what the other one had captured.
    prefills = [run for run in results.runs if run.representation == "prefill"]
    assert [(run.mode, run.earlier) for run in prefills] == [("overlapped", ""), ("serial", "")]
    assert prefills[0].handoff != prefills[1].handoff
    assert len(list((tmp_path / "captures").iterdir())) == 2
    rows = {row.representation: row for row in results.rows_of("overlapped")}
    native = rows["native"].metrics
    # At 100 Mb/s the megabytes of a native cache take most of the time, and the link is full.
    assert 0.04 < native["gbit_per_s"].median < 0.12
    assert rows["int4"].metrics["payload_bytes"].median < 0.4 * native["payload_bytes"].median
    assert rows["native"].equal == rows["native"].compared == 2
    report = (tmp_path / "two-node.md").read_text()
    assert "iperf3 before 0.0" in report
    # Both kinds took turns in one run, and only one of them encoded before it sent.
    assert "## One stage after another" in report
    modes = [run.mode for run in results.runs if run.representation == "native"]
    assert modes == ["overlapped", "serial", "serial", "overlapped"]
    for run in results.runs:
        if run.mode == "serial" and "send" in run.handoff:
            assert run.handoff["encode"] <= run.handoff["start"]
            assert run.handoff["load_busy"] <= run.handoff["load"]


@pytest.mark.slow
@needs_link
def test_a_later_run_reads_captured_caches_and_wide_classes_are_moved_only(
    clean, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny("llama", tmp_path / "model", max_position_embeddings=600)
    argv = ["two-node", "--emulate", "1gbit", "--model", str(tmp_path / "model"), "--threads", "1"]
    argv += ["--contexts", "400,1k", "--documents", "1", "--repeats", "1", "--decode", "4"]
    argv += ["--representations", "text,native,int4", "--capture-dir", str(tmp_path / "captures")]
    assert bench.main([*argv, "--out", str(tmp_path / "first")]) == 0
    first = read_results(tmp_path / "first" / "two-node.json")
    assert first.wide_contexts == ("1k",)
    assert first.wide_kv.nodes["token_bytes"] == 131_072
    (reason,) = [item.reason for item in first.left_out if item.context == "1k"]
    assert "bytes-only" in reason
    wide = {row.representation: row for row in first.rows if row.context == "1k"}
    assert set(wide) == {"native", "int4"}
    for run in first.runs:
        assert not run.earlier
        if run.context == "1k" and run.representation != "prefill":
            assert (run.answer, run.ids) == ({}, ())
            assert run.round_trip_s >= run.handoff["total"]
    native = wide["native"].metrics
    assert native["payload_bytes"].median == wide["native"].tokens * 131_072
    assert {row.context for row in first.comparable().rows} == {"400"}
    report = (tmp_path / "first" / "two-node.md").read_text()
    assert "tokens, wide KV)" in report
    assert "a round trip ends with the receipt" in report

    assert bench.main([*argv, "--no-wide-kv", "--out", str(tmp_path / "second")]) == 0
    second = read_results(tmp_path / "second" / "two-node.json")
    assert second.wide_contexts == ()
    assert [(x.context, x.reason) for x in second.left_out] == [
        ("1k", "1024 tokens exceed the model's window of 600")
    ]
    (earlier,) = second.prefills
    (now,) = [item for item in first.prefills if item.context == "400"]
    assert earlier.earlier
    assert earlier.seconds == now.seconds
    assert earlier.earlier in (tmp_path / "second" / "two-node.md").read_text()
    read = {
        run.ids for run in (*first.runs, *second.runs) if run.ids and run.representation == "text"
    }
    assert len(read) == 1
    moved = [run.ids for run in second.runs if run.representation == "native"]
    assert moved == list(read)  # from a captured cache

    argv += ["--threads", "2", "--representations", "native", "--no-wide-kv"]
    assert bench.main([*argv, "--out", str(tmp_path / "third")]) == 0
    (other,) = read_results(tmp_path / "third" / "two-node.json").prefills
    assert other.earlier == ""  # a time of one thread says nothing about two
    assert other.seconds != now.seconds


@pytest.mark.slow
@needs_link
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_stopped_leaves_runs_and_nothing_else(clean, model, tmp_path, number):
    folder = tmp_path / "tmp"
    folder.mkdir()
    argv = ["--emulate", "100mbit", "--model", str(model), "--contexts", "1k"]
    argv += ["--repeats", "500", "--threads", "1", "--out", str(tmp_path / "out")]
    argv += ["--capture-dir", str(tmp_path / "captures")]
    log = tmp_path / "out" / "two-node.runs.jsonl"
    with _started(argv, folder) as process:
        deadline_s = time.monotonic() + START_S
        while not log.exists() or log.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        (name,) = [n for n in own(process.pid) if n.endswith("-receiver")]
        daemons = run_tool("ip", "netns", "pids", name).split()
        assert daemons
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else 143)
        said = process.stderr.read()
        assert own(process.pid) == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in daemons)
    assert "Traceback" not in said
    assert list(folder.iterdir()) == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == [log.name]


@needs_link
def test_without_root_it_is_one_clear_line(tmp_path):
    script = (
        "import os, sys\n"
        "from cachelink_bench.two_node.command import main\n"
        "os.setuid(65534)\n"
        "sys.exit(main(['--emulate', '1gbit', '--out', sys.argv[1]]))\n"
    )
    done = _run([sys.executable, "-c", script, str(tmp_path / "out")])
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "cachelink-bench two-node: --emulate makes network namespaces, which needs root"
    ]


@needs_link
@pytest.mark.parametrize("tool", ["ip", "tc", "iperf3"])
def test_a_missing_tool_is_named_with_its_package(clean, tmp_path, monkeypatch, capsys, tool):
    for other in {"ip", "tc", "iperf3"} - {tool}:
        (tmp_path / other).symlink_to(shutil.which(other))
    with monkeypatch.context() as changed:
        changed.setenv("PATH", str(tmp_path))
        assert bench.main(["two-node", "--emulate", "1gbit", "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    package = "iperf3" if tool == "iperf3" else "iproute2"
    assert f"--emulate needs {tool}, which is not here (Debian: {package})" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fast",), "--emulate is 'fast'"),
        (("10kbit",), "--emulate is '10kbit'"),
        (("1gbit", "fast"), "--delay: "),
        (("1gbit", "2s"), "--delay is '2s'"),
        (("1gbit", "0s", "100"), "--loss is '100'"),
        (("1gbit", "0s", "nan"), "--loss is 'nan'"),
        (("1gbit", "0s", "some"), "--loss is 'some'"),
    ],
)
def test_a_wrong_link_is_an_error_that_names_the_option(arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse_link(*arguments)


def test_a_link_is_read_from_its_options():
    spec = parse_link("10gbit", "0.2ms", "0.5%")
    assert (spec.rate_bits, spec.delay_s, spec.loss_percent) == (10**10, 0.0002, 0.5)
    assert spec.burst_bytes == 2_500_000
    assert parse_link("2.5MBIT").rate_bits == 2_500_000


@contextmanager
def _started(argv: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A benchmark of its own process; where a test fails, it and what it made are removed."""
    command = [sys.executable, "-m", "cachelink_bench", "two-node", *argv]
    with subprocess.Popen(
        command,
        env=_environment() | {"TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # nothing, if it has ended
            process.wait()
            for name in own(process.pid):
                remove_namespace(name)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def _environment() -> dict[str, str]:
    parts = [str(ROOT / part) for part in ("", "sender", "receiver", "bench")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(parts), "OMP_NUM_THREADS": "1"}
