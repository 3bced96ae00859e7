"""The command line: commands by name, and the way in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

import typer

from cachelink_core.cli.answer import answer
from cachelink_core.cli.caches import caches, evict
from cachelink_core.cli.connection import JsonOption
from cachelink_core.cli.demo.command import demo
from cachelink_core.cli.exit_codes import epilog
from cachelink_core.cli.handoff import handoff
from cachelink_core.cli.inspect import inspect, verify
from cachelink_core.cli.output import console, facts, print_json, reporting
from cachelink_core.cli.ping import ping
from cachelink_core.cli.pipeline import pipeline
from cachelink_core.cli.plan import plan
from cachelink_core.cli.timeline import timeline
from cachelink_core.cli.versions import versions
from cachelink_core.fit.cli_commands import fit_command, solve_command
from cachelink_core.fit.train_commands import convert_command, gate_command, train_command
from cachelink_core.manifest import MIN_READER_VERSION, SCHEMA_VERSION

app = typer.Typer(
    name="cachelink",
    help="Hand a language model's KV cache to another node, and answer from it there.",
    epilog=epilog(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@reporting
def show_version(json_output: JsonOption = False) -> None:
    """Show versions: of CacheLink, of its manifest schema, and of what it runs on."""
    schema = {"schema": SCHEMA_VERSION, "least reader": MIN_READER_VERSION}
    if json_output:
        print_json(
            {
                "versions": versions(),
                "schema_version": SCHEMA_VERSION,
                "min_reader_version": MIN_READER_VERSION,
            }
        )
    else:
        console().print(facts({**versions(), **schema}))


_COMMANDS: Final = (
    (demo, "demo", "Start both daemons on this machine and hand a real model's cache over."),
    (handoff, "handoff", "Have a sender read a prefix and hand its cache over."),
    (answer, "answer", "Ask a node; the answer streams."),
    (pipeline, "pipeline", "Answer many questions; the next document is always under way."),
    (caches, "caches", "List the caches of a node."),
    (evict, "evict", "Drop caches from a node."),
    (ping, "ping", "Show what two nodes are, and whether they fit."),
    (plan, "plan", "Predict transfer and re-reading for a prefix length, and where they cross."),
    (timeline, "timeline", "Draw a handoff's receipt: when each block passed each stage."),
    (inspect, "inspect", "Show what a manifest, a spilled cache or a mapper holds."),
    (verify, "verify", "Check a manifest, a spilled cache or a mapper."),
    (reporting(fit_command), "fit", "Fit a mapper from one model's cache to another's."),
    (reporting(solve_command), "solve", "Make another mapper of saved moments."),
    (reporting(convert_command), "convert", "Make training lines of a public data set."),
    (reporting(train_command), "train", "Train a mapper's residual through the frozen receiver."),
    (reporting(gate_command), "gate", "Judge a mapper on held-out text."),
    (show_version, "version", "Show versions."),
)
for _function, _name, _short in _COMMANDS:
    app.command(_name, short_help=_short)(_function)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs ``cachelink``; leaves with one of ``exit_codes.ExitCode``.

    Args:
        arguments: of the command line; those of this process if None.
    """
    app(args=None if arguments is None else list(arguments), prog_name="cachelink")
    raise AssertionError("a command always leaves")
