"""The daemons as operating-system processes: ready line, signals, a killed peer, and their logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachelink_core.engine.loading import load_engine
from cachelink_core.rpc.client import (
    Document,
    HeldCache,
    Question,
    ReceiverClient,
    Sampling,
    SenderClient,
    TokenIds,
)
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.testing.tiny_models import save_tiny

ROOT = Path(__file__).parents[2]
START_S = 90.0
SECRET = "the vault opens with seven turns to the left"


class Process:
    """One daemon as a child; its ready line is read, its log kept."""

    def __init__(self, module: str, log: Path, *flags: str) -> None:
        self.log = log
        roots = [str(ROOT / part) for part in ("", "sender", "receiver")]
        with log.open("w") as errors:
            self.child = subprocess.Popen(
                [sys.executable, "-m", module, "--listen.port", "0", "--http.port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"},
            )

    def ready(self) -> dict[str, str]:
        line = self.child.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        try:
            return self.child.wait(40)
        finally:
            self.child.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(10)
        if not self.child.stdout.closed:
            self.child.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    save_tiny("llama", folder / "model")
    # Once here, so that the digests are cached and both children start from the same.
    load_engine(str(folder / "model"), device="cpu", cache_dir=folder / "cache")
    return folder


def flags(folder: Path) -> tuple[str, ...]:
    return "--model.name", str(folder / "model"), "--model.cache-dir", str(folder / "cache")


@pytest.mark.slow
def test_a_life_of_two_processes(model, tmp_path):
    with Process("cachelink_receiver", tmp_path / "receiver.log", *flags(model)) as receiver:
        addresses = receiver.ready()
        assert addresses["event"] == "ready"
        address = addresses["grpc"]
        with Process(
            "cachelink_sender", tmp_path / "sender.log", *flags(model),
            "--receivers", f"local={address}",
        ) as sender:  # fmt: skip
            with (
                SenderClient(sender.ready()["grpc"]) as ask,
                ReceiverClient(address) as node,
            ):
                receipt = ask.handoff(Document(SECRET * 4), "local", codec="int8+zstd")
                answer = node.answer(
                    HeldCache(receipt.cache_id),
                    Question("How?"),
                    sampling=Sampling(max_new_tokens=4, ignore_eos=True),
                )
                answer.text()
                assert answer.final.path == "lossy"
            assert sender.end() == 0
        assert receiver.end(signal.SIGINT) == 0
    logs = [(tmp_path / f"{side}.log").read_text() for side in ("sender", "receiver")]
    for log in logs:
        events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert any(event.get("handoff_id") == receipt.handoff_id for event in events)
        assert SECRET[:20] not in log


@pytest.mark.slow
def test_a_sender_killed_after_reserve_frees_the_reservation(model, tmp_path):
    """The sender process reserves and dies; its lease ends and the bytes are free again."""
    script = """
import os, sys
from cachelink_core.codec_spec import NATIVE, NO_PACKING
from cachelink_core.engine.loading import load_engine
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.manifest import encode_header
from cachelink_core.rpc.transfer_client import TransferClient
from pathlib import Path
engine = load_engine(sys.argv[2], device="cpu", cache_dir=Path(sys.argv[3]))
header = make_header(engine, [5] * 50, NATIVE, NO_PACKING, sender_epoch=mint_id(), lease_s=2.0)
TransferClient(sys.argv[1]).reserve(encode_header(header))
print(header.handoff_id, flush=True)
os.kill(os.getpid(), 9)
"""
    with Process("cachelink_receiver", tmp_path / "receiver.log", *flags(model)) as receiver:
        address = receiver.ready()["grpc"]
        killed = subprocess.run(
            [sys.executable, "-c", script, address, str(model / "model"), str(model / "cache")],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        handoff_id = killed.stdout.strip()
        with ReceiverClient(address) as node, TransferClient(address) as transfer:
            deadline_s = time.monotonic() + 6.0
            while node.caches().reserved_bytes and time.monotonic() < deadline_s:
                time.sleep(0.1)
            assert node.caches().reserved_bytes == 0
            assert transfer.status(handoff_id).state == "Expired"
            answer = node.answer(
                HeldCache(handoff_id), TokenIds((7,)), on_failure="recompute",
                sampling=Sampling(max_new_tokens=2, ignore_eos=True),
            )  # fmt: skip
            answer.text()
            assert answer.final.path == "recompute"
        assert receiver.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (("--model.nam", "x"), 2, "--model.nam"),
        (("--store.budget", "many"), 2, "store.budget"),
        (("--listen.host", "0.0.0.0"), 2, "allow_insecure_bind"),
        (("--model.name", "/no/such/folder"), 1, "/no/such/folder"),
    ],
)
def test_a_wrong_start_is_one_clear_line(tmp_path, argv, status, words):
    with Process("cachelink_receiver", tmp_path / "log", *argv) as receiver:
        assert receiver.child.wait(START_S) == status
    lines = [x for x in (tmp_path / "log").read_text().splitlines() if not x.startswith("{")]
    assert len(lines) == 1
    assert words in lines[0]


@pytest.mark.slow
def test_an_aborted_daemon_says_what_each_thread_was_doing(model, tmp_path):
    with Process("cachelink_receiver", tmp_path / "log", *flags(model)) as receiver:
        receiver.ready()
        assert receiver.end(signal.SIGABRT) == -signal.SIGABRT
    said = (tmp_path / "log").read_text()
    assert said.count("hread 0x") > 3
    assert "lifecycle.py" in said
