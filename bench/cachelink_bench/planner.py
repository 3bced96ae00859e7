"""``cachelink-bench planner``: every way timed on emulated links, beside what the planner picks.

Two daemons in two network namespaces; for each link rate and prefix length every way is run in turn
(transfer by each codec of a cache that the sender holds, and the receiver reading the ids itself), with
``codec: auto`` among them. Recorded per run: seconds from the request to the first token, client's clock.
The readings of both nodes before each length are kept, so that a plan can be made again from the file.
Needs root.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.emulation.namespaces import emulated_link
from cachelink_bench.emulation.nodes import RECEIVER_NAME, emulated_nodes
from cachelink_bench.emulation.spec import parse_link
from cachelink_bench.environment import environment
from cachelink_bench.planner_runs import Case, Task
from cachelink_bench.report import load_average
from cachelink_core import logs, texts
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import CacheLinkError, InternalError

FORMAT: Final = "cachelink planner 1"


class LinkRuns(msgspec.Struct, frozen=True):
    """Everything that was run on one link.

    Attributes:
        rate: of the link, such as ``100mbit``.
        repeats: rounds of each length.
        cases: one a prefix length.
    """

    rate: str
    repeats: int
    cases: tuple[Case, ...]


class Document(msgspec.Struct, frozen=True):
    """The result."""

    format: str
    date: str
    command: str
    model: str
    environment: dict[str, object]
    load_average: float
    links: tuple[LinkRuns, ...]


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error; 2 for wrong arguments.
    """
    options = _parse(argv)
    logs.install("error", "console")
    try:
        document = _run(options)
    except CacheLinkError as error:
        print(f"cachelink-bench planner: {error}", file=sys.stderr)
        return 1
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=1)
    if options.json:
        options.json.write_bytes(encoded + b"\n")
    else:
        print(encoded.decode())
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cachelink-bench planner", description=__doc__)
    parser.add_argument("--model", default="demo", help="name, folder or GGUF file")
    parser.add_argument("--emulate", default="10mbit,100mbit,1gbit", help="link rates")
    parser.add_argument("--tokens", default="256,512,1024", help="prefix lengths")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each length")
    parser.add_argument("--threads", type=int, default=1, help="of each daemon's model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document")
    return parser.parse_args(argv)


def _command(options: argparse.Namespace) -> str:
    """What makes the same runs; where the result went is nobody's business."""
    given = {name: value for name, value in vars(options).items() if name != "json"}
    return " ".join(["cachelink-bench planner", *(f"--{n} {v}" for n, v in given.items())])


def _run(options: argparse.Namespace) -> Document:
    lengths = tuple(int(each) for each in options.tokens.split(","))
    specs = [parse_link(rate) for rate in options.emulate.split(",")]
    load = load_average()
    text = "\n".join(texts.read(name) for name in ("prose", "essay", "dialogue", "manual"))
    ids = load_engine(options.model, device="cpu").tokens.document(text).ids
    daemon = ["--model.name", options.model, "--model.device", "cpu"]
    daemon += ["--model.threads", str(options.threads)]
    links = []
    for spec in specs:
        print(f"{spec.rate} …", file=sys.stderr)
        with (
            tempfile.TemporaryDirectory(prefix="cachelink-planner-") as folder,
            emulated_link(spec) as on,
            emulated_nodes(on, daemon, Path(folder)) as nodes,
        ):
            task = Task(
                sender=nodes.sender_address,
                receiver=nodes.receiver_address,
                receiver_name=RECEIVER_NAME,
                ids=ids,
                lengths=lengths,
                repeats=options.repeats,
            )
            cases = _run_within(on.within("sender"), task)
        links.append(LinkRuns(spec.rate, options.repeats, cases))
    return Document(
        format=FORMAT,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=_command(options),
        model=options.model,
        environment=environment(),
        load_average=load,
        links=tuple(links),
    )


def _run_within(within: Sequence[str], task: Task) -> tuple[Case, ...]:
    """Runs a task in a process of its own, inside the sender's namespace."""
    command = [*within, sys.executable, "-m", "cachelink_bench.planner_runs"]
    done = subprocess.run(
        command, input=msgspec.json.encode(task), stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise InternalError(f"the measuring process ended with {done.returncode}")
    return msgspec.json.decode(done.stdout, type=tuple[Case, ...])
