"""The client tool against two real daemons, each a process of its own, with a tiny model."""

import io
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachelink_core.cli import main
from cachelink_core.cli.demo.daemons import Nodes, two_nodes
from cachelink_core.engine.spill import save_cache
from cachelink_core.identity import LayerGeometry
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import encode_header
from cachelink_core.rpc.auth import Tokens
from cachelink_core.rpc.server import Listen, build_server
from cachelink_core.rpc.slots import Slots
from cachelink_core.rpc.tls import TlsFiles
from cachelink_core.testing import handoffs
from cachelink_core.testing.scripted_nodes import ScriptedSender
from cachelink_core.testing.tiny_models import save_tiny

CERTIFICATES = Path(__file__).parent / "certificates"
CA = CERTIFICATES / "ca.pem"
DOCUMENT = "The sea and the sand, and then the other and the thing. " * 6


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    model = save_tiny("llama", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(sys.path))
        options = ["--model.name", str(model), "--model.cache-dir", str(folder / "cache")]
        with two_nodes(options) as running:
            yield running
            assert running.drain() == {"sender": 0, "receiver": 0}


@pytest.fixture
def run(capsys):
    """Runs a command; returns exit code, standard output and standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main([str(each) for each in arguments])
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return run


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture
def receipt(run, nodes: Nodes, document):
    """Of a handoff through the tool, as JSON."""
    code, out, err = run("handoff", document, "--sender", nodes.sender_address, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def at(nodes: Nodes) -> tuple[str, str]:
    return "--node", nodes.receiver_address


def answered(run, nodes, *arguments):
    code, out, err = run("answer", *at(nodes), "--json", "--max-new-tokens", "8", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_handoff_prints_the_cache_and_its_times(run, nodes, document):
    code, out, err = run(
        "handoff", document, "--sender", nodes.sender_address, "--receiver", "demo",
        "--codec", "int4+zstd", "--no-stream", "--lease", "20s",
    )  # fmt: skip
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert len(rows["cache"].split()[1]) == 64
    assert "int4+zstd (lossy)" in rows["codec"]
    assert {"prefill", "send", "load", "install", "total"} <= rows.keys()


def test_a_handoff_is_one_json_document(receipt):
    assert receipt["codec"] == "native"
    assert receipt["trust"] == "exact"
    assert receipt["tokens"] > 100
    assert receipt["native_bytes"] > 0


def test_the_cache_answers_as_the_document_does(run, nodes, receipt, document):
    by_cache = answered(run, nodes, "--cache", receipt["cache_id"], "What?", "--ignore-eos")
    by_handoff = answered(run, nodes, "--handoff", receipt["handoff_id"], "What?", "--ignore-eos")
    re_read = answered(run, nodes, "--document", document, "What?", "--ignore-eos")
    assert by_cache["token_ids"] == by_handoff["token_ids"] == re_read["token_ids"]
    assert by_cache["text"] == re_read["text"]
    assert (by_cache["final"]["path"], re_read["final"]["path"]) == ("exact", "recompute")
    assert by_cache["final"]["cached_tokens"] == receipt["tokens"]


def test_an_answer_streams_and_its_facts_come_apart(run, nodes, receipt):
    told = answered(run, nodes, "--cache", receipt["cache_id"], "What?")
    code, out, err = run(
        "answer", *at(nodes), "--cache", receipt["cache_id"], "What?", "--max-new-tokens", "8"
    )
    assert code == 0
    assert out == told["text"] + "\n"
    assert err.startswith("[path exact; ")
    assert err.count("\n") == 1


def test_the_sender_answers_too(run, nodes, receipt):
    code, out, _ = run(
        "answer", "--node", nodes.sender_address, "--cache", receipt["sender_cache_id"], "--json",
        "--max-new-tokens", "8", "What?",
    )  # fmt: skip
    assert code == 0
    told = answered(run, nodes, "--cache", receipt["cache_id"], "What?")
    assert json.loads(out)["token_ids"] == told["token_ids"]


def test_sampling_arguments_arrive(run, nodes, receipt):
    asked = ("--cache", receipt["cache_id"], "What?", "--ignore-eos", "--temperature", "5")
    one = answered(run, nodes, *asked, "--seed", "1", "--top-p", "0.9", "--logprobs", "2")
    again = answered(run, nodes, *asked, "--seed", "1", "--top-p", "0.9", "--logprobs", "2")
    other = answered(run, nodes, *asked, "--seed", "2", "--top-p", "0.9")
    assert one["token_ids"] == again["token_ids"] != other["token_ids"]
    assert len(one["token_ids"]) == len(one["logprobs"]) == 8
    assert len(one["logprobs"][0]["alternatives"]) == 2


def test_a_stop_string_ends_the_answer(run, nodes, receipt):
    whole = answered(run, nodes, "--cache", receipt["cache_id"], "What?", "--ignore-eos")
    stop = next(char for char in whole["text"][1:] if char.isascii() and char.isprintable())
    cut = answered(
        run, nodes, "--cache", receipt["cache_id"], "What?", "--ignore-eos", "--stop", stop
    )
    assert stop not in cut["text"]
    assert whole["text"].startswith(cut["text"])


def test_a_kept_answer_is_the_next_turns_cache(run, nodes, receipt):
    first = answered(run, nodes, "--cache", receipt["cache_id"], "What?", "--keep")
    kept = first["final"]["kept_cache_id"]
    second = answered(run, nodes, "--cache", kept, "And?")
    assert second["final"]["cached_tokens"] > receipt["tokens"]


def test_every_way_to_give_a_prefix_is_handed_over(run, nodes, receipt, tmp_path, monkeypatch):
    address = ("--sender", nodes.sender_address, "--json")
    code, out, _ = run("handoff", "--cache-id", receipt["sender_cache_id"], *address)
    assert (code, json.loads(out)["already_installed"]) == (0, True)
    code, out, _ = run("handoff", "--token-ids", "5,6,7,8", *address)
    assert (code, json.loads(out)["tokens"]) == (0, 4)
    messages = tmp_path / "messages.json"
    messages.write_text('[{"role": "user", "content": "hi"}]')
    code, out, _ = run("handoff", "--messages", messages, *address)
    assert (code, json.loads(out)["prefilled_tokens"] > 4) == (0, True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DOCUMENT.encode())))
    code, out, _ = run("handoff", "-", *address)
    assert (code, json.loads(out)["cache_id"]) == (0, receipt["cache_id"])


def test_caches_are_listed_and_evicted(run, nodes, receipt):
    code, out, _ = run("caches", *at(nodes), "--json")
    held = {each["cache_id"]: each for each in json.loads(out)["caches"]}
    assert (code, held[receipt["cache_id"]]["trust"]) == (0, "exact")
    code, out, _ = run("caches", *at(nodes))
    assert receipt["cache_id"] in out
    assert "budget 4000.00 MB" in out
    code, out, _ = run("evict", receipt["cache_id"], *at(nodes), "--json")
    assert (code, json.loads(out)["freed_bytes"][receipt["cache_id"]] > 0) == (0, True)
    code, out, err = run("evict", receipt["cache_id"], *at(nodes), "--json")
    assert (code, json.loads(out)["error"]["reason"]) == (4, "unknown_cache")
    assert err.startswith("cachelink: unknown_cache: ")


def test_an_evicted_cache_is_read_again_only_when_that_is_asked_for(run, nodes, receipt):
    run("evict", receipt["cache_id"], *at(nodes))
    code, _, err = run("answer", *at(nodes), "--cache", receipt["cache_id"], "What?")
    assert (code, err.split(":")[1]) == (4, " unknown_cache")
    told = answered(
        run, nodes, "--cache", receipt["cache_id"], "What?", "--on-failure", "recompute"
    )
    assert told["final"]["path"] == "recompute"


def test_equal_nodes_fit(run, nodes):
    addresses = ("--sender", nodes.sender_address, "--receiver", nodes.receiver_address)
    code, out, err = run("ping", *addresses)
    assert (code, err) == (0, "")
    assert "They fit" in out
    code, out, _ = run("ping", *addresses, "--json")
    found = json.loads(out)
    assert (code, found["fits"], found["differences"]) == (0, True, [])
    assert found["sender"]["receivers"] == ["demo"]
    assert found["sender"]["epoch"] != found["receiver"]["epoch"]


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_one_node_is_shown_alone(run, nodes, role):
    address = getattr(nodes, f"{role}_address")
    code, out, _ = run("ping", "--node", address, "--json")
    found = json.loads(out)
    assert (code, found[role]["role"], found["fits"]) == (0, role, None)


def test_a_node_that_is_not_there_is_unreachable_and_the_other_is_shown(run, nodes):
    code, out, err = run(
        "ping", "--sender", "127.0.0.1:1", "--receiver", nodes.receiver_address, "--json"
    )
    found = json.loads(out)
    assert code == 5
    assert (found["error"]["reason"], found["error"]["retryable"]) == ("peer_gone", True)
    assert found["receiver"]["role"] == "receiver"
    assert err.startswith("cachelink: peer_gone: ")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--receiver", "elsewhere", "--token-ids", "1,2"), 8, "denied"),
        (("--codec", "int3", "--token-ids", "1,2"), 2, "unknown_codec"),
        (("--token-ids", "1,4000000"), 2, "invalid_request"),
        (("--cache-id", "nothing"), 4, "unknown_cache"),
        (("--mapper", "any", "--token-ids", "1,2"), 3, "incompatible_peer"),
    ],
)
def test_a_refused_handoff_has_its_exit_code(run, nodes, arguments, code, reason):
    found, out, err = run("handoff", "--sender", nodes.sender_address, "--json", *arguments)
    assert (found, json.loads(out)["error"]["reason"]) == (code, reason)
    assert err.count("\n") == 1


def test_a_running_tool_loads_no_model_runtime(nodes):
    heavy = ("torch", "transformers", "numpy", "safetensors")
    program = (
        "import sys\n"
        "from cachelink_core.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        f"    print(sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)\n"
    )
    for arguments in (
        ["ping", "--sender", nodes.sender_address, "--receiver", nodes.receiver_address],
        ["caches", *at(nodes)],
        ["answer", "--help"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        assert done.stderr == "[]\n"


def test_wrong_usage_exits_2_and_says_where_help_is():
    done = subprocess.run(
        [sys.executable, "-m", "cachelink_core.cli", "handoff", "--codecs"],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such option" in done.stderr


@pytest.fixture
def scripted():
    """Serves a scripted sender with given options; returns its address."""
    with ExitStack() as stack:

        def serve(**options) -> str:
            server = build_server(
                Listen(**options),
                transfers=Slots("transfers", 1),
                answers=Slots("answers", 1),
                sender=ScriptedSender("sender"),
            )
            stack.callback(server.stop, 0.0)
            server.start()
            return server.address

        yield serve


def test_nodes_that_do_not_fit_are_told_apart_field_by_field(run, nodes, scripted):
    addresses = ("--sender", scripted(), "--receiver", nodes.receiver_address)
    code, out, err = run("ping", *addresses, "--json")
    found = json.loads(out)
    assert (code, err, found["fits"]) == (3, "", False)
    named = {each["field"]: each for each in found["differences"]}
    theirs = found["receiver"]["identity"]["weights_digest"]
    assert named["weights_digest"]["receiver"] == theirs
    assert named["weights_digest"]["sender"] != theirs
    code, out, _ = run("ping", *addresses)
    assert code == 3
    assert "They do not fit" in out
    assert theirs in out


def test_a_token_is_read_from_its_file(run, scripted, tmp_path):
    address = scripted(tokens=Tokens({"the-token-of-team-1": "team"}))
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("the-token-of-team-1\n")
    wrong.write_text("the-token-of-team-2\n")
    code, out, _ = run("caches", "--node", address, "--json", "--token-file", right)
    assert (code, json.loads(out)["caches"][0]["cache_id"]) == (0, "cache-of-team")
    assert run("caches", "--node", address, "--token-file", wrong)[0] == 8
    assert run("caches", "--node", address)[0] == 8
    code, _, err = run("caches", "--node", address, "--token-file", tmp_path / "nowhere")
    assert (code, err.split(":")[1]) == (3, " config_error")


def test_tls_shows_a_certificate(run, scripted):
    address = scripted(tls=TlsFiles(CERTIFICATES / "server.pem", CERTIFICATES / "server.key", CA))
    own = "--tls-certificate", CERTIFICATES / "client.pem", "--tls-key", CERTIFICATES / "client.key"
    assert run("caches", "--node", address, "--tls-ca", CA, *own)[0] == 0
    assert run("caches", "--node", address, "--tls-ca", CA)[0] == 5
    assert run("caches", "--node", address)[0] == 5
    assert run("caches", "--node", address, "--tls-ca", CA, *own[:2])[0] == 3


@pytest.fixture
def spilled(tmp_path):
    """A cache on disk, of made-up keys and values."""
    geometry = LayerGeometry(kv_heads=2, head_dim=8, rotary_dim=8)
    header = handoffs.header(layers=(geometry, geometry), tokens=20)
    cache = PrefixCache.allocate(header.identity.layers, "bfloat16", 20, 4, whole=True)
    for layer in range(2):
        for kind in ("K", "V"):
            cache.tensor(layer, kind, 0, 20).fill_(layer + 1.5)
    cache.set_length(20)
    path = tmp_path / "spilled" / "cache.safetensors"
    path.parent.mkdir()
    save_cache(path, encode_header(header), cache)
    return path


def test_a_spilled_cache_is_shown_and_verified(run, spilled):
    code, out, _ = run("inspect", spilled)
    assert code == 0
    assert "20: 100 101" in out
    code, out, _ = run("inspect", "--json", spilled.parent)
    assert (code, json.loads(out)["kind"]) == (0, "cache")
    code, out, _ = run("verify", "--json", spilled)
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    assert {"layer.0.K", "layer.1.V"} <= {each["name"] for each in found["tensors"]}


def test_a_spilled_cache_with_a_flipped_bit_is_data_loss(run, spilled):
    whole = bytearray(spilled.read_bytes())
    whole[8 + int.from_bytes(whole[:8], "little")] ^= 1  # the first byte of the first tensor
    spilled.write_bytes(whole)
    code, out, err = run("verify", "--json", spilled)
    assert (code, json.loads(out)["error"]["reason"]) == (7, "checksum_mismatch")
    assert "tensor 'layer." in err


def test_a_spilled_cache_that_is_cut_is_data_loss(run, spilled):
    spilled.write_bytes(spilled.read_bytes()[:-100])
    for command in ("inspect", "verify"):
        code, _, err = run(command, spilled)
        assert (code, err.split(":")[1]) == (7, " corrupt_chunk")
