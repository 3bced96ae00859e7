"""``cachelink timeline``: a receipt as a trace and as a picture."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest

from cachelink_core.cli import main
from cachelink_core.cli.timeline_spans import STAGES, make_spans
from cachelink_core.rpc.types import Receipt, Timeline

BLOCKS = 5
LINE = Timeline(
    # The prefill began 0.3 s before Reserve was answered; a block takes it 1 s.
    prefilled_at_s=(0.7, 1.7, 2.7, 3.7, 4.7),
    encoded_at_s=(0.8, 1.8, 2.8, 3.8, 4.8),
    sent_at_s=(1.0, 2.0, 3.0, 4.0, 5.0),
    verified_at_s=(1.2, 2.2, 3.2, 4.2, 5.2),
    installed_at_s=(1.25, 2.25, 3.25, 4.25, 5.25),
)
RECEIPT = Receipt(
    handoff_id="h", cache_id="c", sender_cache_id="s", tokens=1280, prefilled_tokens=1280,
    codec="native", trust="exact", wire_bytes=10**6,
    phases={"prefill": 5.0, "push": 5.4}, timeline=LINE,
)  # fmt: skip


@pytest.fixture
def run(capsys, tmp_path):
    """Runs the command on a receipt; returns exit code and standard error."""

    def run(receipt: object, *arguments: object) -> tuple[object, str]:
        path = tmp_path / "receipt.json"
        path.write_bytes(msgspec.json.encode(receipt))
        with pytest.raises(SystemExit) as left:
            main(["timeline", str(path), *map(str, arguments)])
        return left.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def events(run, tmp_path):
    code, _ = run(RECEIPT, "--trace", tmp_path / "trace.json")
    assert code == 0
    document = json.loads((tmp_path / "trace.json").read_text())
    assert "not comparable" in document["otherData"]["clocks"]
    return document["traceEvents"]


def test_every_block_is_in_every_stage_once(events):
    found = [(e["cat"], e["args"]["block"]) for e in events if e["ph"] == "X"]
    stages = [stage for side in STAGES.values() for stage in side]
    wanted = [(stage, block) for stage in stages for block in range(BLOCKS)]
    assert sorted(found) == sorted([*wanted, ("receipt", BLOCKS - 1)])


def test_events_are_what_viewers_read(events):
    assert {e["ph"] for e in events} == {"X", "M", "i"}
    assert all(isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in events)
    assert all(e["ts"] >= 0 for e in events if e["ph"] != "M")
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert ["Reserve's reply" in names[pid] for pid in (1, 2)] == [True, True]
    # Both sides' zero lies where the reply does, 0.3 s after the prefill's begin.
    assert [e["ts"] for e in events if e["ph"] == "i"] == pytest.approx([0.3e6, 0.3e6])


def test_a_track_never_has_two_blocks_at_once_and_goes_forwards(events):
    tracks: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(tracks) == 5
    for track in tracks.values():
        for before, after in pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_a_stage_begins_with_a_block_when_it_is_there_and_the_one_before_is_through():
    spans = make_spans(RECEIPT)
    assert spans.stages["prefill"][0].begin_s == pytest.approx(-0.3)
    assert [span.begin_s for span in spans.stages["encode"]] == list(LINE.prefilled_at_s)
    assert [span.begin_s for span in spans.stages["send"]] == [0.7, 1.7, 2.7, 3.7, 4.7]
    assert [span.begin_s for span in spans.stages["verify"]] == [0.0, *LINE.installed_at_s[:-1]]
    assert [span.begin_s for span in spans.stages["install"]] == list(LINE.verified_at_s)
    assert (spans.receipt.begin_s, spans.receipt.end_s) == (5.0, 5.4)


def test_a_cache_that_was_there_has_no_prefill_but_every_block():
    held = Timeline(
        (-0.1,) * BLOCKS, LINE.encoded_at_s, LINE.sent_at_s, LINE.verified_at_s, LINE.installed_at_s
    )
    spans = make_spans(
        Receipt("h", "c", "s", 5, 0, "native", "exact", phases={"push": 6.0}, timeline=held)
    )
    assert {span.end_s - span.begin_s for span in spans.stages["prefill"]} == {0.0}
    assert [span.begin_s for span in spans.stages["send"]] == [0.0, *LINE.sent_at_s[:-1]]


def test_the_picture_is_written(run, tmp_path):
    assert run(RECEIPT, "--png", tmp_path / "out.png") == (0, "")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"timeline": Timeline()}, "nothing was sent"),
        ({"timeline": Timeline(*[(1.0, 2.0)] * 4, (1.0,))}, "installed_at_s has 1 blocks"),
        ({"timeline": Timeline(*[(1.0, 2.0)] * 4, (2.0, 1.0))}, "installed_at_s goes back"),
        ({"phases": {}}, "'push'"),
    ],
)
def test_a_receipt_without_a_whole_timeline_is_one_clear_line(run, tmp_path, changed, word):
    fields = {name: getattr(RECEIPT, name) for name in Receipt.__dataclass_fields__}
    code, err = run(Receipt(**{**fields, **changed}), "--trace", tmp_path / "trace.json")
    assert code == 2
    assert word in err
    assert not (tmp_path / "trace.json").exists()


def test_no_output_another_document_or_a_place_that_is_none_are_refused(run, tmp_path):
    assert "--trace FILE.json" in run(RECEIPT)[1]
    assert "not what handoff --json prints" in run({"a": 1}, "--png", tmp_path / "x.png")[1]
    assert "cannot be written" in run(RECEIPT, "--png", tmp_path / "no" / "x.png")[1]
    assert "cannot be written" in run(RECEIPT, "--trace", tmp_path)[1]
