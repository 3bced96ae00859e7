"""Every claim of the README that a machine can check: commands, names, numbers, and the example."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer

from cachelink_core import manifest
from cachelink_core.cli.app import app
from cachelink_core.config import DaemonConfig, load_config
from cachelink_core.config.loading import options
from cachelink_core.errors import all_errors
from cachelink_core.metrics import Metrics
from cachelink_receiver.config import ReceiverConfig
from cachelink_sender.config import SenderConfig
from tests.loopback.nodes import pair_of, tiny_engine
from tests.repo import quoted_results
from tests.repo.documents import ROOT, commands, fences, inline, read, table

README = read("README.md")
CLI = typer.main.get_command(app)

GUARANTEES = {
    "a chunk does not match its digest": ["refusals:a_wrong_stream_publishes_nothing"],
    "the stream ends before its commit": ["refusals:a_wrong_stream_publishes_nothing"],
    "the commit does not fit what arrived": [
        "refusals:a_seal_that_lies_is_refused",
        "refusals:a_wrong_stream_publishes_nothing",
    ],
    "the sender is killed while sending": [
        "rpc_keepalive:a_killed_sender_is_noticed_at_once",
        "refusals:a_wrong_stream_publishes_nothing",
    ],
    "the sender dies after Reserve": [
        "refusals:a_reservation_without_a_stream_is_freed_when_its_lease_ends"
    ],
    "the receiver dies or restarts": ["streaming:a_restarted_receiver_is_found_again"],
    "a message is meant for an earlier life of the receiver": ["refusals:an_old_epoch_is_refused"],
    "the caller of a handoff goes away": ["streaming:cancelling_a_handoff_frees_both_sides"],
    "the models differ": ["refusals:wrong_identity_is_refused_by_name"],
    "the cache exceeds the budget": ["refusals:a_cache_beyond_the_budget_is_refused_at_once"],
    "the receiver is slow": ["streaming:a_slow_receiver_holds_the_encoder_within_four_blocks"],
    "every slot is taken": ["operation:with_every_slot_taken_control_calls_still_answer"],
    "a cache is gone or never arrived": [
        "answers:an_evicted_cache_is_read_again_by_id",
        "refusals:after_a_failure_the_prefix_can_be_read_again_by_id",
    ],
    "SIGTERM": ["operation:draining_refuses_new_work_and_finishes_what_runs"],
}
"""Each row of the table of guarantees, and the tests in tests/loopback that hold it."""


def test_a_newcomers_first_commands_come_early():
    lines = README.splitlines()
    made = [
        (number, line.split()[1]) for number, line in enumerate(lines, 1) if line[:5] == "make "
    ]
    assert [target for _, target in made[:2]] == ["demo", "test"]
    assert made[0][0] < 35


def test_every_make_target_exists():
    named = {line.split()[1] for line in commands(README, "make")}
    phony = re.search(r"^\.PHONY: (.+)$", read("Makefile"), flags=re.MULTILINE)
    assert named
    assert named <= set(phony[1].split())


def parse(command, words: list[str]) -> None:
    """Parses as the tool would, without running anything; complains of what it does not know."""
    if not isinstance(command, typer.core.TyperGroup):
        command.make_context(command.name, words)
        return
    if words and words[0] in command.commands:
        if len(words) > 1:
            parse(command.commands[words[0]], words[1:])
        return
    assert words in (["--help"], ["-h"]), words


def test_every_command_of_the_tool_parses():
    lines = commands(README, "cachelink")
    assert len(lines) >= 4
    for line in lines:
        parse(CLI, shlex.split(line)[1:])


@pytest.mark.parametrize("wrong", ["answer --no-such", "no-such", "handoff --codec"])
def test_the_parser_notices_what_does_not_exist(wrong):
    with pytest.raises(Exception, match=r"no-such|--codec"):
        parse(CLI, wrong.split())


def test_every_verb_named_alone_is_a_command_of_the_tool():
    section = README.split("\n`ping` shows")[1].split("\n\n")[0]
    verbs = {span for span in inline("`ping` shows" + section) if re.fullmatch("[a-z]+", span)}
    assert verbs == {"ping", "handoff", "answer", "caches", "evict", "inspect", "verify"}
    assert verbs <= set(CLI.commands)


@pytest.mark.parametrize(("name", "cls"), [("sender", SenderConfig), ("receiver", ReceiverConfig)])
def test_every_daemon_command_is_accepted(name: str, cls: type[DaemonConfig]):
    lines = commands(README, f"cachelink-{name}")
    assert lines
    for line in lines:
        words = [str(ROOT / w) if w.endswith(".yaml") else w for w in shlex.split(line)[1:]]
        load_config(cls, words, {})


def test_every_option_named_alone_exists():
    named = {span for span in inline(README) if re.fullmatch(r"--[a-z.\-]+", span)}
    tool = {
        name
        for command in CLI.commands.values()
        for parameter in command.params
        for name in parameter.opts
    }
    daemons = {option.flag for cls in (SenderConfig, ReceiverConfig) for option in options(cls)}
    unknown = named - tool - daemons
    assert named
    assert unknown <= {"--print-config", "--help"}


def test_every_benchmark_exists():
    for line in commands(README, "cachelink-bench"):
        assert (ROOT / "bench" / "cachelink_bench" / f"{line.split()[1]}.py").exists(), line


def test_ports_are_the_defaults():
    rows = {row[0]: row[1:] for row in table(README, "Operate", "| | sender")}
    configs = SenderConfig(), ReceiverConfig()
    assert rows["gRPC"] == [str(config.listen.port) for config in configs]
    (http,) = (ports for name, ports in rows.items() if "/metrics" in name)
    assert http == [str(config.http.port) for config in configs]


def test_each_guarantee_is_tested():
    rows = table(README, "Guarantees", "| event")
    assert [row[0] for row in rows] == list(GUARANTEES)
    for held_by in GUARANTEES.values():
        for module, _, name in (entry.partition(":") for entry in held_by):
            assert f"def test_{name}(" in read(f"tests/loopback/test_{module}.py"), name


def test_reasons_and_metrics_of_the_guarantees_exist():
    shown = README.split("\n## Guarantees\n")[1].split("\n## ")[0]
    reasons = re.findall(r"\b([A-Z_]{8,}) `([a-z_]+)`", shown)
    assert len(reasons) >= 8
    for status, reason in reasons:
        assert all_errors()[reason].status == status, reason
    exported = {info.name for info in Metrics("receiver").describe()}
    assert {span for span in inline(shown) if span.startswith("cachelink_")} - exported <= {
        "cachelink_core"
    }


def test_quoted_results_are_those_of_the_files():
    codecs = quoted_results.result("codecs-smollm2.json")
    demo = quoted_results.result("demo-smollm2.json")
    assert quoted_results.codecs_table(codecs) in README, quoted_results.codecs_table(codecs)
    assert quoted_results.demo_table(demo) in README, quoted_results.demo_table(demo)
    pair = quoted_results.pair_table(quoted_results.result("recall-pair-demo.json"))
    assert pair in README, pair
    plain = " ".join(README.split())
    assert f"a median of {quoted_results.noise_floor(codecs)}:" in plain
    shifted = quoted_results.median_kl(codecs, "int4 per token, bias 300")
    kept = quoted_results.median_kl(codecs, "int4, bias 300")
    assert f"its median KL is {shifted}; that of `int4` stays at {kept}." in plain
    assert demo["ok"]
    assert all(target["met"] for target in codecs["targets"])


def test_the_opening_numbers_are_those_of_the_two_node_table():
    rows = {
        row["representation"]: row
        for row in quoted_results.result("two-node-1gbit.json")["rows"]
        if row["context"] == "8k"
    }
    first = {name: row["metrics"]["first_token_s"]["median"] for name, row in rows.items()}
    claim = (
        f"the first token behind {round(rows['native']['tokens']):,} tokens of text came after "
        f"{first['native']:.1f} s from the exact cache, after {first['int8']:.1f} s from a quantized "
        f"one, and after {first['text']:.1f} s from the text"
    )
    assert claim in " ".join(README.split()), claim


def test_compatibility_is_what_the_project_declares():
    project = read("pyproject.toml")
    rows = {row[0]: row[1] for row in table(README, "Compatibility", "| | |")}
    python = re.search(r'requires-python = ">=([\d.]+)"', project)[1]
    assert rows["Python"].startswith(f"{python} or newer")
    torch = re.search(r'"torch>=([\d.]+)"', project)[1]
    assert rows["torch"].startswith(f"{torch} or newer")
    lowest, above = re.search(r'"transformers>=([\d.]+),<(\d+)"', project).groups()
    assert rows["transformers"].startswith(f"{lowest} to {int(above) - 1}.x")
    schema = (
        f"manifest schema {manifest.SCHEMA_VERSION}, least reader {manifest.MIN_READER_VERSION}"
    )
    assert schema in rows["wire"]


def test_the_python_example_runs(tmp_path):
    (example,) = fences(README, "python")
    assert len(example.strip().splitlines()) <= 14
    (tmp_path / "report.txt").write_text("A report on boats, by nobody. " * 5, encoding="utf-8")
    engines = [tiny_engine(tmp_path, "llama") for _ in range(2)]
    with pair_of(*engines, {"headroom_tokens": 400}, {"headroom_tokens": 400}) as pair:
        for default, daemon in (("127.0.0.1:7401", pair.sender), ("127.0.0.1:7411", pair.receiver)):
            assert example.count(default) == 1
            example = example.replace(default, daemon.addresses["grpc"])
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    tokens = first.split()[0]
    assert re.fullmatch(r"\d+ tokens in \d+ bytes, lossy", first)
    assert re.fullmatch(rf"lossy: read \d+ tokens, held {tokens}", last)
