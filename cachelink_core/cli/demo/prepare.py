"""Makes the model ready before two processes load it, and tokenizes the document.

``prepare`` runs this module as a process of its own, so that the tool itself never loads torch: a
GGUF is converted and the weights' digest is computed once, and what the demonstration needs to know
of the tokens comes back as JSON.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from cachelink_core.cli.demo.plan import Plan
from cachelink_core.errors import CacheLinkError, LinkTimeout, ModelUnavailable, all_errors
from cachelink_core.manifest import QueryFrame

DEADLINE_S: Final = 600.0
"""Converting a GGUF takes a minute, or several on a busy machine."""

_HELP: Final = "the demonstration needs the model's runtime: pip install 'cachelink[demo]'"


class Request(msgspec.Struct):
    """What is asked of the process."""

    model: str
    document: str
    cache_dir: str | None = None


class Prepared(msgspec.Struct):
    """What it answers.

    Attributes:
        token_ids: of the document, as a node makes a prefix of it.
        frame: around a question about it.
        eos_ids: tokens that end an answer.
    """

    token_ids: tuple[int, ...]
    frame: QueryFrame
    eos_ids: frozenset[int]


class _Failed(msgspec.Struct):
    reason: str
    message: str


class _Reply(msgspec.Struct):
    prepared: Prepared | None = None
    failed: _Failed | None = None


def prepare(plan: Plan) -> Prepared:
    """Makes the model of a plan ready, in a process of its own.

    Raises:
        CacheLinkError: as the engine raised it, such as ModelUnavailable.
        LinkTimeout: it took too long.
    """
    request = Request(plan.model, plan.document, str(plan.cache_dir) if plan.cache_dir else None)
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", __name__],
            input=msgspec.json.encode(request),
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LinkTimeout(f"model {plan.model!r} was not ready after {DEADLINE_S:g} s") from error
    try:
        reply = msgspec.json.decode(done.stdout, type=_Reply)
    except msgspec.DecodeError as error:
        tail = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelUnavailable(f"model {plan.model!r} could not be prepared: {tail}") from error
    if reply.failed is not None:
        known = all_errors().get(reply.failed.reason, ModelUnavailable)
        raise known(reply.failed.message)
    assert reply.prepared is not None, "a reply is one of the two"
    return reply.prepared


def _reply(request: Request) -> _Reply:
    try:
        from cachelink_core.engine.loading import load_engine
    except ImportError as error:
        return _Reply(failed=_Failed(ModelUnavailable.reason, f"{_HELP} ({error})"))
    folder = Path(request.cache_dir) if request.cache_dir else None
    try:
        engine = load_engine(request.model, cache_dir=folder)
        prefix = engine.tokens.document(request.document)
    except CacheLinkError as error:
        return _Reply(failed=_Failed(error.reason, str(error)))
    return _Reply(prepared=Prepared(prefix.ids, prefix.frame, engine.eos_ids))


def main() -> None:
    """Reads a request from standard input, writes the reply to standard output."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    sys.stdout.buffer.write(msgspec.json.encode(_reply(request)))


if __name__ == "__main__":
    main()
