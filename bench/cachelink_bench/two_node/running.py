"""One whole run, from nothing to its result: documents, daemons, link, measurement."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from cachelink_bench.emulation.namespaces import emulated_link
from cachelink_bench.emulation.nodes import RECEIVER_NAME, emulated_nodes
from cachelink_bench.emulation.probes import echo_s, iperf_gbit
from cachelink_bench.emulation.spec import LinkSpec
from cachelink_bench.emulation.system_commands import check_tools
from cachelink_bench.environment import environment
from cachelink_bench.report import load_average
from cachelink_bench.two_node.job import Job, run_job, run_job_within
from cachelink_bench.two_node.measure import Addresses
from cachelink_bench.two_node.peers import find_pair
from cachelink_bench.two_node.plan import Mode, Plan
from cachelink_bench.two_node.results import Link, Results, describe, make_prefills, make_rows
from cachelink_bench.two_node.runs import FORMAT, RunLog
from cachelink_bench.two_node.subjects import WARM_UP, LeftOut, Subject, make_subjects
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError
from cachelink_core.identity import ModelIdentity


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how a plan runs.

    Attributes:
        sender: address of a daemon that runs; empty if they are started here.
        receiver: likewise.
        receiver_name: of the receiver in the sender's list; empty if there is only one.
        link: to emulate; None for daemons that run.
        threads: of each daemon that is started here; None for the runtime's choice.
        log: path of the runs.
        resume: go on with the runs that are there.
        command: as it was given.
        note: for the report.
    """

    sender: str
    receiver: str
    receiver_name: str
    link: LinkSpec | None
    threads: int | None
    log: Path
    resume: bool
    command: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Prepared:
    identity: ModelIdentity
    subjects: tuple[Subject, ...]
    left_out: tuple[LeftOut, ...]


def run(plan: Plan, settings: Settings) -> Results:
    """Measures what is missing and sums everything up.

    Raises:
        CacheLinkError: a wrong setting, a tool or a model that is not here, or a daemon that
            cannot be reached, refused or failed. Nothing but the log of runs is left behind.
    """
    load = load_average()
    theirs = _look(plan, settings)
    prepared = _prepare(plan, theirs)
    config = _config(plan, settings, prepared.identity)
    RunLog(settings.log, config, resume=settings.resume)  # says now if it cannot be
    job = Job(
        plan=plan,
        subjects=prepared.subjects,
        log=str(settings.log),
        config=config,
        pairs={
            mode: Addresses(settings.sender, settings.receiver, settings.receiver_name)
            for mode in plan.modes
        },
    )
    if settings.link is None:
        nodes, link = run_job(job), None
    else:
        nodes, link = _emulated(settings.link, job, settings.threads)
    runs = tuple(RunLog(settings.log, config, resume=True).runs)
    return Results(
        format=FORMAT,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=settings.command,
        config=plan,
        environment=environment(),
        nodes=nodes,
        load_average=load,
        documents=tuple(describe(s) for s in prepared.subjects if s.context != WARM_UP),
        left_out=prepared.left_out,
        link=link,
        prefills=make_prefills(plan, runs),
        rows=make_rows(plan, runs),
        runs=runs,
        note=settings.note,
    )


def _look(plan: Plan, settings: Settings) -> ModelIdentity | None:
    """Finds out what is cheap to find out before a model is loaded."""
    if settings.link is not None:
        check_tools()
        return None
    at = settings.sender, settings.receiver, settings.receiver_name
    return find_pair(*at, plan.modes[0]).identity


def _prepare(plan: Plan, theirs: ModelIdentity | None) -> _Prepared:
    """Cuts the documents. For daemons started here it also converts and digests the model once."""
    engine = load_engine(plan.model, device="cpu")
    ours = engine.identity
    for field in ("vocabulary_digest", "template_digest"):
        if theirs is not None and getattr(ours, field) != getattr(theirs, field):
            raise ConfigError(
                f"--model {plan.model!r} cuts text otherwise than the daemons' model: {field} is "
                f"{getattr(ours, field)}, theirs {getattr(theirs, field)}"
            )
    identity = theirs or ours
    subjects, left_out = make_subjects(plan, engine.tokens, identity.max_positions)
    return _Prepared(identity, subjects, left_out)


def _config(plan: Plan, settings: Settings, identity: ModelIdentity) -> dict[str, object]:
    config: dict[str, object] = msgspec.to_builtins(plan)
    config["link"] = msgspec.to_builtins(settings.link)
    config["threads"] = settings.threads
    config["identity"] = identity.digest()
    return config


def _emulated(spec: LinkSpec, job: Job, threads: int | None) -> tuple[dict[str, object], Link]:
    """Runs a job between two daemons on a link that is there only meanwhile."""
    options = ["--model.name", job.plan.model, "--model.device", "cpu"]
    if threads is not None:
        options += ["--model.threads", str(threads)]
    with (
        tempfile.TemporaryDirectory(prefix="cachelink-two-node-") as logs,
        emulated_link(spec) as on,
    ):
        before, echo = iperf_gbit(on), echo_s(on)
        with ExitStack() as stack:
            pairs: dict[Mode, Addresses] = {}
            for mode in job.plan.modes:
                started = stack.enter_context(
                    emulated_nodes(on, options, Path(logs), serial=mode == "serial")
                )
                pairs[mode] = Addresses(
                    started.sender_address, started.receiver_address, RECEIVER_NAME
                )
            nodes = run_job_within(on.within("sender"), msgspec.structs.replace(job, pairs=pairs))
        after = iperf_gbit(on)
        return nodes, Link(
            rate=spec.rate,
            delay_s=spec.delay_s,
            loss_percent=spec.loss_percent,
            shaper=on.shaper,
            iperf_before_gbit=before,
            iperf_after_gbit=after,
            round_trip_s=echo,
        )
