"""One whole run, from nothing to its result: documents, daemons, link, measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.emulation.namespaces import EmulatedLink, emulated_link
from cachelink_bench.emulation.nodes import RECEIVER_NAME, emulated_nodes
from cachelink_bench.emulation.probes import echo_s, iperf_gbit
from cachelink_bench.emulation.spec import LinkSpec
from cachelink_bench.emulation.system_commands import check_tools
from cachelink_bench.environment import environment
from cachelink_bench.report import load_average
from cachelink_bench.two_node.client import Addresses
from cachelink_bench.two_node.job import Job, run_job, run_job_within
from cachelink_bench.two_node.parts import Part, make_parts
from cachelink_bench.two_node.peers import find_pair
from cachelink_bench.two_node.plan import Mode, Plan
from cachelink_bench.two_node.results import (
    Link,
    Results,
    WideKv,
    describe,
    make_prefills,
    make_rows,
)
from cachelink_bench.two_node.runs import FORMAT, RunLog, Session
from cachelink_bench.two_node.stopping import run_stoppable
from cachelink_bench.two_node.subjects import WARM_UP
from cachelink_core.identity import ModelIdentity

_CAPTURE_BUDGET: Final = "40GB"
"""Of one model and mode: six 16k documents of the wide-KV model take 13 GB."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how a plan runs.

    Attributes:
        at: where daemons are that run; None if they are started here.
        link: to emulate; None for daemons that run.
        threads: of each daemon that is started here; None for the runtime's choice.
        log: path of the runs.
        resume: go on with the runs that are there.
        command: as it was given.
        note: for the report.
        capture_dir: below it senders that are started here keep what they prefill; None keeps
            nothing.
    """

    at: Addresses | None
    link: LinkSpec | None
    threads: int | None
    log: Path
    resume: bool
    command: str
    note: str = ""
    capture_dir: Path | None = None


def run(plan: Plan, settings: Settings) -> Results:
    """Measures what is missing and sums everything up.

    Raises:
        CacheLinkError: a wrong setting, a tool or a model that is not here, or a daemon that
            cannot be reached, refused or failed. Nothing but the log of runs is left behind.
    """
    session, machine = _session(settings), environment()
    theirs = _look(plan, settings)
    parts, left_out = make_parts(plan, theirs, started_here=settings.link is not None)
    config = _config(plan, settings, parts)
    RunLog(settings.log, config, resume=settings.resume)  # says now if it cannot be
    jobs = [_job(part, settings, config, machine, session) for part in parts]
    if settings.link is None:
        (job,) = jobs
        nodes, link = [run_job(job)], None
    else:
        nodes, link = _emulated(settings.link, jobs, settings)
    log = RunLog(settings.log, config, resume=True)
    if link is not None:
        log.end_session(session.began, link.iperf_after_gbit)
    runs, sessions = tuple(log.runs), tuple(log.sessions.values())
    notes = dict.fromkeys((*(each.note for each in sessions), settings.note))
    return Results(
        format=FORMAT,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=settings.command,
        config=plan,
        resolved=config,
        environment=machine,
        nodes=nodes[0],
        load_average=max(each.load_average for each in sessions or (session,)),
        documents=tuple(
            describe(s) for part in parts for s in part.subjects if s.context != WARM_UP
        ),
        left_out=left_out,
        link=link,
        prefills=make_prefills(plan, runs),
        rows=make_rows(plan, runs),
        runs=runs,
        note=" ".join(note for note in notes if note),
        wide_kv=_wide(parts, nodes),
        sessions=sessions,
    )


def _session(settings: Settings) -> Session:
    return Session(
        began=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        command=settings.command,
        load_average=load_average(),
        note=settings.note,
    )


def _wide(parts: Sequence[Part], nodes: Sequence[dict[str, object]]) -> WideKv | None:
    for part, each in zip(parts, nodes, strict=True):
        if part.bytes_only:
            return WideKv(contexts=part.plan.contexts, nodes=each)
    return None


def _look(plan: Plan, settings: Settings) -> ModelIdentity | None:
    """Finds out what is cheap to find out before a model is loaded."""
    if settings.at is None:
        check_tools()
        return None
    at = settings.at
    return run_stoppable(lambda _stop: find_pair(at, plan.modes[0])).identity


def _config(plan: Plan, settings: Settings, parts: Sequence[Part]) -> dict[str, object]:
    config: dict[str, object] = msgspec.to_builtins(plan)
    config["link"] = msgspec.to_builtins(settings.link)
    config["threads"] = settings.threads
    config["identity"] = [part.identity.digest() for part in parts]
    return config


def _job(
    part: Part,
    settings: Settings,
    config: dict[str, object],
    machine: dict[str, object],
    session: Session,
) -> Job:
    started_here = settings.at is None
    threads = settings.threads or machine["threads"]
    return Job(
        plan=part.plan,
        subjects=part.subjects,
        log=str(settings.log),
        config=config,
        session=session,
        pairs=dict.fromkeys(part.plan.modes, settings.at) if settings.at else {},
        setting=f"{machine['processor']}, {machine['cpus']} cores, threads {threads}",
        captures=str(settings.capture_dir or "") if started_here else "",
        bytes_only=part.bytes_only,
    )


def _emulated(
    spec: LinkSpec, jobs: Sequence[Job], settings: Settings
) -> tuple[list[dict[str, object]], Link]:
    """Runs jobs, each between daemons of its own, on a link that is there only meanwhile."""
    with emulated_link(spec) as on:
        before, echo = iperf_gbit(on), echo_s(on)
        told = [_with_rate(job, before) for job in jobs]
        nodes = [_run_between_daemons(on, job, settings) for job in told]
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


def _with_rate(job: Job, iperf_before_gbit: float) -> Job:
    session = msgspec.structs.replace(job.session, iperf_before_gbit=iperf_before_gbit)
    return msgspec.structs.replace(job, session=session)


def _run_between_daemons(on: EmulatedLink, job: Job, settings: Settings) -> dict[str, object]:
    """Starts the daemons of every mode, runs the job, and ends them."""
    options = ["--model.name", job.plan.model, "--model.device", "cpu"]
    if settings.threads is not None:
        options += ["--model.threads", str(settings.threads)]
    with (
        tempfile.TemporaryDirectory(prefix="cachelink-two-node-") as logs,
        ExitStack() as stack,
    ):
        pairs: dict[Mode, Addresses] = {}
        for mode in job.plan.modes:
            started = stack.enter_context(
                emulated_nodes(
                    on,
                    options,
                    Path(logs),
                    sender_options=_capture_options(job, mode),
                    serial=mode == "serial",
                )
            )
            pairs[mode] = Addresses(started.sender_address, started.receiver_address, RECEIVER_NAME)
        return run_job_within(on.within("sender"), msgspec.structs.replace(job, pairs=pairs))


def _capture_options(job: Job, mode: Mode) -> list[str]:
    folder = job.capture_folder(mode)
    if folder is None:
        return []
    return ["--capture-dir", str(folder), "--capture-budget", _CAPTURE_BUDGET]
