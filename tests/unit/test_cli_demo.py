"""The demonstration's parts that need no model: plan, rows, claims, and the processes it starts."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cachelink_bench.emulation.nodes import drain
from cachelink_core import texts
from cachelink_core.cli.demo.checks import check_exits, check_rows
from cachelink_core.cli.demo.daemons import DaemonProcess
from cachelink_core.cli.demo.plan import CODECS, OTHER, RE_READ, STREAMED, ZEROED, make_plan
from cachelink_core.cli.demo.rows import Row, Said, common_prefix
from cachelink_core.cli.demo.zeroed import zeroed_header
from cachelink_core.errors import InvalidRequest, LinkTimeout, PeerGone
from cachelink_core.manifest import QueryFrame, decode_header, encode_header
from cachelink_core.rpc.client import Final
from cachelink_core.testing import handoffs

RIGHT, WRONG = "It was the Finch.", "Nobody knows."
PATHS = {"native": "exact", "native+zstd": "exact", STREAMED: "exact", RE_READ: "recompute"}


def row(arm: str, **changes) -> Row:
    wrong = arm in (ZEROED, OTHER)
    answer = changes.pop("answer", WRONG if wrong else RIGHT)
    ids = changes.pop("token_ids", (9, 8, 7) if wrong else (1, 2, 3))
    path = changes.pop("path", PATHS.get(arm, "lossy"))
    final = Final(path, "", 0, 0, 3, 3, "length", {"query_prefill": 0.5}, 0.25)
    made = Row(
        arm=arm, tokens=10, wire_bytes=0 if arm == RE_READ else 50, bf16_bytes=100, prefill_s=1.0,
        send_s=0.1, load_s=0.0, load_busy_s=0.0, install_s=0.0, round_trip_s=2.0, cold=False,
        said=Said(ids, answer + " and more", answer, final),
    )  # fmt: skip
    return replace(made, **changes)


def broken(**changed: dict) -> list[str]:
    """Claims that fail when some arms are changed; names are the arms', ``_`` for what a name has not."""
    arms = (*CODECS, STREAMED, RE_READ, ZEROED, OTHER)
    names = {arm: "".join(c if c.isalnum() else "_" for c in arm) for arm in arms}
    rows = [row(arm, **changed.get(names[arm], {})) for arm in arms]
    return [check.claim for check in check_rows(rows, tokens=3, expected="Finch") if not check.ok]


def test_every_claim_holds_of_a_right_run():
    assert broken() == []


@pytest.mark.parametrize("arm", ["native", "native_zstd", "streamed"])
def test_an_exact_arm_must_have_the_tokens_of_the_re_read(arm):
    (claim,) = broken(**{arm: {"token_ids": (1, 2, 4)}})
    assert claim.endswith("its tokens are those of the re-read")


@pytest.mark.parametrize("arm", ["int8", "int4", "int4_zstd"])
def test_a_lossy_arm_may_differ_in_its_tokens_but_not_in_its_path(arm):
    assert broken(**{arm: {"token_ids": (1, 2, 4), "answer": WRONG}}) == []
    (claim,) = broken(**{arm: {"path": "recompute"}})
    assert claim.endswith("the path is lossy")


@pytest.mark.parametrize("arm", ["native", "streamed", "re_read"])
def test_a_right_answer_contains_the_expected_words(arm):
    (claim,) = broken(**{arm: {"answer": WRONG}})
    assert claim.endswith("the answer contains 'Finch'")


@pytest.mark.parametrize("arm", ["zeroed", "other_text"])
def test_a_wrong_cache_must_answer_otherwise(arm):
    (claim,) = broken(**{arm: {"token_ids": (1, 2, 3)}})
    assert claim.endswith("its tokens are not those of the re-read")
    (claim,) = broken(**{arm: {"answer": RIGHT}})
    assert claim.endswith("the answer does not contain 'Finch'")


def test_an_answer_must_be_complete():
    (claim,) = broken(int8={"token_ids": (1, 2)})
    assert claim == "int8: 3 tokens are generated"


def test_bytes_must_have_moved():
    (claim,) = broken(native_zstd={"wire_bytes": 0})
    assert claim == "native+zstd: the cache moved"


def test_a_re_read_must_re_read():
    (claim,) = broken(re_read={"path": "exact"})
    assert claim == "re-read: the path is recompute"


def test_words_are_not_checked_where_nobody_knows_them():
    arms = (*CODECS, STREAMED, RE_READ, ZEROED, OTHER)
    rows = [row(arm, answer="?") for arm in arms]
    assert all(check.ok for check in check_rows(rows, tokens=3, expected=""))


def test_a_daemon_must_drain():
    good, bad = check_exits({"sender": 0, "receiver": 1})
    assert (good.ok, bad.ok) == (True, False)
    assert "exit status 1" in bad.seen


def test_a_row_compares_itself_with_the_re_read():
    found = row("int4", token_ids=(1, 2, 4)).document(row(RE_READ))
    assert (found["equals_re_read"], found["same_first_tokens"]) == (False, 2)
    assert found["ratio_to_bf16"] == 0.5
    assert (found["query_prefill_s"], found["first_token_s"]) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("left", "right", "count"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (3, 2), 0)]
)
def test_a_common_beginning_is_counted(left, right, count):
    assert common_prefix(left, right) == common_prefix(right, left) == count


def test_the_plan_has_the_shipped_texts():
    plan = make_plan()
    assert (plan.document, plan.other) == (texts.read(texts.DEMO), texts.read(texts.DEMO_OTHER))
    assert (plan.question, plan.expected) == (texts.DEMO_QUESTION, texts.DEMO_ANSWER)


def test_another_model_or_question_is_not_held_to_the_shipped_answer():
    assert make_plan(model="other").expected == ""
    assert make_plan(question="Why?").expected == ""
    assert make_plan(question="Why?", expected="because").expected == "because"


def test_a_document_needs_a_question():
    with pytest.raises(InvalidRequest, match="no question"):
        make_plan(document=("title", "text"))
    with pytest.raises(InvalidRequest, match="tokens is 0"):
        make_plan(tokens=0)


@pytest.mark.parametrize(("dtype", "trust"), [("bfloat16", "exact"), ("float32", "lossy")])
def test_the_zeroed_header_is_one_that_a_receiver_admits(dtype, trust):
    identity = handoffs.identity((handoffs.FULL,), dtype)
    header = zeroed_header(identity, (1, 2, 3), QueryFrame("<", ">"))
    decoded = decode_header(encode_header(header))
    assert (decoded.ids, decoded.trust, decoded.codec.id) == ((1, 2, 3), trust, "bf16")
    assert decoded.query_frame == QueryFrame("<", ">")


STUBBORN = (
    "import faulthandler, json, signal, time",
    "faulthandler.enable()",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "print(json.dumps({'event': 'ready'}), flush=True)",
    "def never_ends(): time.sleep(60)",
    "never_ends()",
)
"""A daemon's whole life that SIGTERM does not end."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a daemon whose whole life is the given lines of Python."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *map(str, sys.path)]))
    monkeypatch.setenv("CACHELINK_STORE__BUDGET", "1B")

    def start(*lines: str) -> DaemonProcess:
        Path(tmp_path, "planted_daemon.py").write_text("\n".join(lines))
        return DaemonProcess("planted", "planted_daemon", ["--flag"], tmp_path / "log")

    return start


def test_a_daemon_is_configured_found_ready_and_drained(start):
    lines = (
        "import json, os, sys, time",
        "config = json.load(open('/dev/stdin'))",
        "config['own'] = sum(name.startswith('CACHELINK_') for name in os.environ)",
        "print(json.dumps({'event': 'ready', 'flag': sys.argv[1], **config}), flush=True)",
        "import signal",
        "signal.sigwait({signal.SIGTERM})",
        "sys.exit(3)",
    )
    with start("import signal", "signal.pthread_sigmask(signal.SIG_BLOCK, {15})", *lines) as daemon:
        daemon.configure({"grpc": "here"})
        assert daemon.wait_ready(20.0) == {"flag": "--flag", "grpc": "here", "own": "0"}
        daemon.terminate()
        assert daemon.wait(20.0) == 3


def test_a_daemon_that_ends_at_its_start_says_why(start):
    with start("import sys", "sys.exit('no model here')") as daemon:
        with pytest.raises(PeerGone, match="status 1 at its start: no model here"):
            daemon.wait_ready(20.0)
        daemon.configure({"grpc": "nowhere"})
    assert daemon.exit_status == 1


def test_a_daemon_that_is_never_ready_is_given_up_and_killed(start):
    with (
        start("import time", "time.sleep(60)") as daemon,
        pytest.raises(LinkTimeout, match=r"not ready after 0\.2 s"),
    ):
        daemon.wait_ready(0.2)
    assert daemon.exit_status == -9


def test_a_daemon_that_does_not_drain_is_given_up_and_killed(start, capsys):
    with start(*STUBBORN) as daemon:
        assert daemon.wait_ready(20.0) == {}
        daemon.terminate()
        with pytest.raises(LinkTimeout, match="did not end within"):
            daemon.wait(0.2)
    assert daemon.exit_status == -signal.SIGABRT
    assert "in never_ends" in capsys.readouterr().err


def test_a_benchmark_goes_on_when_a_daemon_does_not_drain(start, capsys):
    with start(*STUBBORN) as daemon:
        daemon.wait_ready(20.0)
        drain(daemon, deadline_s=0.2)
    assert daemon.exit_status == -signal.SIGABRT
    assert "planted did not end within 0.2 s of SIGTERM" in capsys.readouterr().err
