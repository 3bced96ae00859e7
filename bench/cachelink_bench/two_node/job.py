"""Measures in a process of its own, which a network namespace can hold.

The parent has the model's tokenizer and the shaped link; this process is a client of two daemons and
nothing else. A job comes in on standard input, and goes out on standard output how it ended; the
runs are in the log file meanwhile, and progress is shown on standard error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.two_node.client import Addresses
from cachelink_bench.two_node.measure import measure
from cachelink_bench.two_node.peers import find_pairs
from cachelink_bench.two_node.plan import Mode, Plan
from cachelink_bench.two_node.prefill_times import PrefillTimes, capture_folder
from cachelink_bench.two_node.progress import watching
from cachelink_bench.two_node.runs import RunLog, Session
from cachelink_bench.two_node.stopping import Stop, run_stoppable
from cachelink_bench.two_node.subjects import Subject
from cachelink_core.cli.demo.daemons import ended_by_sigterm
from cachelink_core.errors import CacheLinkError, InternalError, all_errors

_END_S: Final = 20.0
"""For a client that was told to end: an answer stops within a token."""


class Job(msgspec.Struct, frozen=True):
    """What is to be measured.

    Attributes:
        plan: of the run.
        subjects: its documents.
        log: path of the runs.
        config: of the log.
        session: of the log: what the runs are measured in.
        pairs: where the nodes of each mode are.
        setting: machine and threads, as far as they are known.
        captures: folder of captured caches and their prefill times; empty for none.
        bytes_only: the model is only moved, never asked.
    """

    plan: Plan
    subjects: tuple[Subject, ...]
    log: str
    config: dict[str, object]
    session: Session
    pairs: dict[Mode, Addresses]
    setting: str = ""
    captures: str = ""
    bytes_only: bool = False

    def capture_folder(self, mode: Mode) -> Path | None:
        """Where the sender of a mode keeps what it prefills; None if it keeps nothing."""
        return capture_folder(Path(self.captures), self.setting, mode) if self.captures else None


class Outcome(msgspec.Struct, frozen=True):
    """How it ended.

    Attributes:
        nodes: of both daemons; empty if it failed.
        reason: of the error.
        message: of the error.
    """

    nodes: dict[str, object] = {}
    reason: str = ""
    message: str = ""


def run_job(job: Job) -> dict[str, object]:
    """Measures what its log lacks; returns what the daemons say they are.

    Raises:
        CacheLinkError: a node cannot be reached, refused or failed.
    """
    return run_stoppable(lambda stop: _measured(job, stop))


def _measured(job: Job, stop: Stop) -> dict[str, object]:
    found = find_pairs(job.pairs)
    pair = found[job.plan.modes[0]]
    identity = pair.identity.digest()
    log = RunLog(Path(job.log), job.config, resume=True, session=job.session)
    with watching() as watch:
        measure(
            job.plan,
            job.subjects,
            log,
            {mode: each.at for mode, each in found.items()},
            watch,
            stop,
            times={
                mode: PrefillTimes(job.capture_folder(mode), job.setting, identity)
                for mode in found
            },
            bytes_only=job.bytes_only,
        )
    return {
        "sender": pair.sender_version,
        "receiver": pair.receiver_version,
        "identity": identity,
        "architecture": pair.identity.architecture,
        "dtype": pair.identity.dtype,
        "token_bytes": pair.identity.token_bytes(),
    }


def run_job_within(within: Sequence[str], job: Job) -> dict[str, object]:
    """The same in a process of its own.

    Args:
        within: words before its command, such as those that enter a namespace.
        job: to run.

    Raises:
        CacheLinkError: as the process raised it.
    """
    command = [*within, sys.executable, "-m", __name__]
    # gRPC would write to the terminal that a daemon which ends has said goodbye.
    quiet = {"GRPC_VERBOSITY": "ERROR", **os.environ}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet
    ) as process:
        try:
            output, _ = process.communicate(msgspec.json.encode(job))
        finally:
            _end(process)
    try:
        outcome = msgspec.json.decode(output, type=Outcome)
    except msgspec.DecodeError as error:
        raise InternalError(f"the measuring process ended with {process.returncode}") from error
    if outcome.reason:
        known = all_errors().get(outcome.reason, InternalError)
        raise _revived(known, outcome.message)
    return outcome.nodes


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _revived(kind: type[CacheLinkError], message: str) -> CacheLinkError:
    from cachelink_core.errors import IdentityMismatch

    return IdentityMismatch((), message) if kind is IdentityMismatch else kind(message)


def main() -> int:
    """Runs the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        with ended_by_sigterm():
            outcome = Outcome(nodes=run_job(job))
    except CacheLinkError as error:
        outcome = Outcome(reason=error.reason, message=str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
