"""``cachelink plan`` without nodes: published pairs, stored measurements, pictures, wrong input."""

import json

import msgspec
import pytest

from cachelink_core.cli import main
from cachelink_core.planner import Measurement
from cachelink_core.planner.readings import unit_of
from cachelink_core.testing import handoffs

SENDER = {"prefill_token": 0.001, "far/link": 1.25e7, "far/fixed": 0.004}
RECEIVER = {"prefill_token": 0.002, "query": 0.05, "decode_token": 0.02, "answer": 0.7}


@pytest.fixture
def run(capsys):
    """Runs the command; returns exit code, standard output and standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["plan", *(str(each) for each in arguments)])
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return run


def node(role: str, values: dict[str, float], receivers=("far",)) -> dict:
    readings = [Measurement(name, value, unit_of(name), 3) for name, value in values.items()]
    return {
        "role": role,
        "identity": handoffs.identity(),
        "measurements": readings,
        "receivers": receivers,
    }


@pytest.fixture
def stored(tmp_path):
    """Writes what ping --json prints for two nodes."""

    def write(sender=SENDER, receiver=RECEIVER, receivers=("far",)):
        path = tmp_path / "ping.json"
        nodes = {
            "sender": node("sender", sender, receivers),
            "receiver": node("receiver", receiver),
            "fits": True,
        }
        path.write_bytes(msgspec.json.encode(nodes))
        return path

    return write


def test_a_published_pair_and_its_least_link(run):
    code, out, _ = run("--tokens", 32768, "--pair", "qwen3-14b-32b", "--link", "1Gbit/s", "--json")
    found = json.loads(out)
    assert (code, found["plan"]["chosen"]) == (0, "text")
    rows = {row["way"]: row for row in found["rows"]}
    native = rows["mapped:native"]
    assert native["break_even_bytes_per_s"] * 8 / 1e9 == pytest.approx(7.07, rel=0.01)
    assert native["crossover_tokens"] is None
    assert native["break_even_questions"] == 7
    assert found["held_tokens"] == 32768


def test_the_table_names_every_way_and_what_is_assumed(run):
    code, out, _ = run("--tokens", 32768, "--pair", "yi-9b-34b", "--link", "10Gbit/s")
    assert code == 0
    assert "link 1250MB/s" in out
    for way in ("mapped:native", "mapped:int4+zstd", "text"):
        assert f"\n{way} " in out
    assert "assumed: prefill and translation: scaled from qwen3-14b-32b" in out
    assert "Gbit/s" in out


def test_stored_measurements_make_the_same_plan_every_time(run, stored):
    code, out, _ = run("--tokens", 500, "--measurements", stored(), "--json")
    assert code == 0
    found = json.loads(out)
    assert found["link_bytes_per_s"] == 1.25e7
    ways = {p["way"]: p for p in found["plan"]["predictions"]}
    assert ways["text"]["first_token_s"] == pytest.approx(1.05)
    assert not ways["native"]["excluded"]
    assert run("--tokens", 500, "--measurements", stored(), "--json")[1] == out


def test_more_questions_and_a_given_link_count(run, stored):
    slow = ("--tokens", 500, "--measurements", stored(), "--link", "1kB/s", "--held", "--json")
    one = json.loads(run(*slow)[1])["plan"]
    many = json.loads(run(*slow, "--questions", 10**6)[1])["plan"]
    assert one["chosen"] == "text"
    assert many["chosen"] != "text"


def test_what_is_asked_for_excludes(run, stored):
    asked = ("--least-trust", "exact", "--tokens", 500, "--measurements", stored(), "--json")
    ways = {p["way"]: p["excluded"] for p in json.loads(run(*asked)[1])["plan"]["predictions"]}
    assert ways["int4"] == "trust is lossy, asked for exact"
    assert ways["native"] == ""


def test_a_picture(run, stored, tmp_path):
    picture = tmp_path / "plan.png"
    code, _, _ = run("--tokens", 500, "--measurements", stored(), "--plot", picture)
    assert code == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pair", "llama"), "pair is 'llama'; known: qwen3-14b-32b"),
        (("--pair", "yi-9b-34b", "--measurements", "x"), "source: --pair, --measurements given"),
        (("--measurements", "/nowhere"), "'/nowhere' cannot be read"),
        (("--pair", "yi-9b-34b", "--link", "0"), "link is '0'; it must be above 0"),
        (("--pair", "yi-9b-34b", "--plot", "/nowhere/x.png"), "plot '/nowhere/x.png' cannot be"),
    ],
)
def test_wrong_input_is_one_clear_line(run, arguments, said):
    code, out, err = run("--tokens", 500, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_link_that_nothing_is_known_of_has_to_be_given(run, stored):
    unmeasured = {"prefill_token": 0.001}
    code, _, err = run("--tokens", 500, "--measurements", stored(sender=unmeasured))
    assert code == 2
    assert "the sender has sent nothing to 'far' yet; give its rate" in err
    assert (
        run("--tokens", 5, "--measurements", stored(sender=unmeasured), "--link", "1GB/s")[0] == 0
    )


def test_of_several_receivers_one_has_to_be_named(run, stored):
    two = {**SENDER, "near/link": 1e9}
    path = stored(sender=two)
    code, _, err = run("--tokens", 500, "--measurements", path)
    assert code == 2
    assert "the sender knows far, near; name one with --name" in err
    found = json.loads(run("--tokens", 500, "--measurements", path, "--name", "near", "--json")[1])
    assert found["link_bytes_per_s"] == 1e9


def test_a_file_of_something_else_is_refused(run, tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"format": "cachelink two-node 1"}')
    code, _, err = run("--tokens", 500, "--measurements", path)
    assert code == 2
    assert "not what ping --json prints" in err
