"""The READMEs of the daemons list exactly the options and metrics that there are."""

import re
import shlex
from pathlib import Path

import pytest

from cachelink_core.config import DaemonConfig, load_config
from cachelink_core.config.document import options_table
from cachelink_core.errors import all_errors
from cachelink_core.metrics import Metrics
from cachelink_receiver.config import ReceiverConfig
from cachelink_sender.config import SenderConfig

ROOT = Path(__file__).parents[2]
DAEMONS = [("sender", SenderConfig), ("receiver", ReceiverConfig)]


def metrics_table(metrics: Metrics) -> str:
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for info in metrics.describe():
        labels = ", ".join(f"`{label}`" for label in info.labels)
        rows.append(f"| `{info.name}` | {info.kind} | {labels} | {info.help} |")
    return "\n".join(rows)


def readme(name: str) -> str:
    return (ROOT / name / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "cls"), DAEMONS)
def test_the_options_are_those_of_the_code(name: str, cls: type[DaemonConfig]) -> None:
    assert options_table(cls) in readme(name)


def test_the_metrics_are_those_of_the_code() -> None:
    assert metrics_table(Metrics("receiver")) in readme("receiver")


@pytest.mark.parametrize(("name", "cls"), DAEMONS)
def test_the_commands_are_accepted(name: str, cls: type[DaemonConfig], tmp_path: Path) -> None:
    commands = re.findall(rf"^cachelink-{name} (.*)$", readme(name), flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        argv = [str(ROOT / a) if a.endswith(".yaml") else a for a in shlex.split(command)]
        load_config(cls, argv, {})


@pytest.mark.parametrize("name", ["sender", "receiver"])
def test_reasons_and_links_exist(name: str) -> None:
    text = readme(name)
    shouted = re.findall(r"\b([A-Z_]{8,}) `([a-z_]+)`", text)
    assert len(shouted) >= 4
    for status, reason in shouted:
        assert all_errors()[reason].status == status, reason
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / name / target).exists(), target
