"""The demonstration from nothing to the last exit status, as a process of its own.

A tiny model exercises every line in seconds; the real one shows that the claims hold of it.
"""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from cachelink_core import texts
from cachelink_core.cli.demo.plan import CODECS, OTHER, RE_READ, STREAMED, ZEROED
from cachelink_core.testing.tiny_models import save_tiny

ARMS = [*CODECS, STREAMED, RE_READ, ZEROED, OTHER]
TIMES = ("query_prefill_s", "first_token_s", "round_trip_s")


def run_demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CACHELINK_")}
    return subprocess.run(
        [sys.executable, "-m", "cachelink_core.cli", "demo", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": ":".join(sys.path)},
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Arguments for a tiny model with documents of two blocks and a piece."""
    folder = tmp_path_factory.mktemp("demo")
    save_tiny("llama", folder / "model")
    (folder / "document").write_text("The sea and the sand, and then the other thing. " * 20)
    (folder / "other").write_text("Mountains are high, rivers are long; so it goes on. " * 20)
    return (
        "--model", folder / "model", "--cache-dir", folder / "cache",
        "--document", folder / "document", "--other", folder / "other", "--question", "What?",
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny_json(tiny):
    done = run_demo(*tiny, "--json", "--tokens", "12")
    assert done.stderr == ""
    assert done.returncode == 0
    return json.loads(done.stdout)


def test_every_arm_is_there_in_its_order(tiny_json):
    assert [row["arm"] for row in tiny_json["rows"]] == ARMS


def test_every_claim_is_checked_and_holds(tiny_json):
    claims = {check["claim"]: check["ok"] for check in tiny_json["checks"]}
    assert tiny_json["ok"]
    assert all(claims.values())
    for arm in ("native", "native+zstd", STREAMED):
        assert f"{arm}: its tokens are those of the re-read" in claims
    for daemon in ("sender", "receiver"):
        assert f"the {daemon} drains and exits 0 on SIGTERM" in claims


def test_the_numbers_are_measured(tiny_json):
    rows = {row["arm"]: row for row in tiny_json["rows"]}
    for row in rows.values():
        assert len(row["token_ids"]) == 12
        assert all(row[name] > 0 for name in TIMES), row["arm"]
        assert row["round_trip_s"] >= row["first_token_s"] >= row["query_prefill_s"]
    sizes = [rows[arm]["wire_bytes"] for arm in ("native", "native+zstd", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert rows["native"]["ratio_to_bf16"] == 2.0  # the tiny model is float32
    assert [row["arm"] for row in rows.values() if row["cold"]] == [STREAMED, RE_READ]
    assert rows["native"]["prefill_s"] == rows["int4"]["prefill_s"] > 0


def test_the_streamed_arm_has_a_timeline_of_every_block(tiny_json):
    receipt = next(row["receipt"] for row in tiny_json["rows"] if row["arm"] == STREAMED)
    stages = receipt["timeline"]
    blocks = -(-receipt["tokens"] // 256)
    assert blocks >= 3
    assert {len(times) for times in stages.values()} == {blocks}
    assert receipt["prefilled_tokens"] == receipt["tokens"]


def test_the_document_says_what_ran(tiny_json):
    assert tiny_json["versions"]["cachelink"]
    assert tiny_json["config"]["tokens"] == 12
    assert tiny_json["machine"]["cpus"] == os.cpu_count()


def test_a_claim_that_does_not_hold_exits_1(tiny):
    done = run_demo(*tiny, "--tokens", "4", "--expect", "words that no random model says")
    assert done.returncode == 1
    complaints = [line for line in done.stderr.splitlines() if "does not hold: " in line]
    assert len(complaints) == 4
    assert "native: the answer contains 'words that no random model says'" in complaints[1]
    assert "33 of 37 checks hold" in done.stdout
    for arm in ARMS:
        assert arm in done.stdout


def test_a_model_that_is_not_there_is_said_so(tmp_path):
    done = run_demo("--model", tmp_path / "nowhere", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["reason"] == "model_unavailable"
    assert "nowhere" in done.stderr


def test_a_demonstration_that_is_ended_ends_its_daemons(tiny):
    command = [sys.executable, "-m", "cachelink_core.cli", "demo", *map(str, tiny)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as demo:
        assert demo.stderr is not None
        lines = iter(demo.stderr.readline, "")
        assert any("ready after" in line for line in lines)
        daemons = psutil.Process(demo.pid).children()
        assert len(daemons) == 2
        demo.terminate()
        assert demo.wait(30) == 128 + signal.SIGTERM
        demo.stderr.read()
    assert not any(daemon.is_running() for daemon in daemons)


@pytest.mark.slow
@pytest.mark.smollm2
def test_a_real_model_answers_from_every_cache():
    done = run_demo("--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], done.stderr) == (0, True, "")
    rows = {row["arm"]: row for row in found["rows"]}
    assert rows["native"]["tokens"] >= 1_500
    assert rows["native"]["ratio_to_bf16"] == 1.0
    assert rows["native+zstd"]["ratio_to_bf16"] <= 0.68
    assert rows["int4"]["ratio_to_bf16"] <= 4.5 / 16
    for arm in (*CODECS, STREAMED, RE_READ):
        assert texts.DEMO_ANSWER in rows[arm]["answer"], arm
    for arm in (ZEROED, OTHER):
        assert texts.DEMO_ANSWER not in rows[arm]["text"], arm
    assert found["total_s"] < 240
