"""Errors of this project as gRPC statuses and back.

A refusal travels as ``google.rpc.Status``: code and message as everywhere in gRPC, and one detail,
``cachelink.v1.ErrorInfo``, whose ``reason`` names the exact class. All of it stays under
``limits.MAX_STATUS_BYTES``, because larger trailers are lost on the way.
"""

from __future__ import annotations

import logging
from typing import Any, Final, NoReturn
from urllib.parse import quote

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from cachelink_core import limits
from cachelink_core.errors import (
    CacheLinkError,
    DataLoss,
    Denied,
    Draining,
    HandoffAborted,
    HandoffFailed,
    IdentityMismatch,
    IncompatiblePeer,
    InternalError,
    InvalidRequest,
    LinkTimeout,
    PeerGone,
    ResourceExhausted,
    Unauthenticated,
    UnknownCache,
    UnsupportedVersion,
    all_errors,
)
from cachelink_core.identity import FieldDiff
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2 as pb

_log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES: Final = 1_000
_MAX_VALUE_CHARS: Final = 100
_MOST_DIFFS: Final = 8
"""In a field of a message, which has no limit that shows when to stop."""


_BY_CODE: Final[dict[grpc.StatusCode, type[CacheLinkError]]] = {
    grpc.StatusCode.UNAVAILABLE: PeerGone,
    grpc.StatusCode.DEADLINE_EXCEEDED: LinkTimeout,
    grpc.StatusCode.CANCELLED: HandoffAborted,
    grpc.StatusCode.ABORTED: HandoffFailed,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownCache,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: IncompatiblePeer,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedVersion,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Denied,
    grpc.StatusCode.DATA_LOSS: DataLoss,
}
"""What a status without our details means: it came from gRPC itself, or from a stranger."""


def to_status(error: CacheLinkError) -> status_pb2.Status:
    """The status of an error, cut to ``limits.MAX_STATUS_BYTES``."""
    code: tuple[int, str] = grpc.StatusCode[error.status].value
    message = _fitting_message(str(error))
    info = pb.ErrorInfo(reason=error.reason, retryable=error.retryable)
    status = status_pb2.Status(code=code[0], message=message)
    status.details.add().Pack(info)
    for diff in error.diffs if isinstance(error, IdentityMismatch) else ():
        info.diffs.add(field=_cut(diff.field), ours=_cut(diff.ours), theirs=_cut(diff.theirs))
        longer = status_pb2.Status(code=code[0], message=message)
        longer.details.add().Pack(info)
        if _trailer_bytes(longer) > limits.MAX_STATUS_BYTES:
            break
        status = longer
    return status


def abort(context: grpc.ServicerContext, error: BaseException) -> NoReturn:
    """Ends a call with an error.

    Anything but a ``CacheLinkError`` is a bug here: it is logged with its traceback, and the peer
    learns only that there was one.
    """
    if not isinstance(error, CacheLinkError):
        _log.error("unexpected error in a call", exc_info=error)
        error = InternalError("a bug in this daemon; its log has the details")
    context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status raises")


def error_from(rpc_error: grpc.RpcError) -> CacheLinkError:
    """The error behind a failed call: its own class where the peer named one we know."""
    call: Any = rpc_error
    code: grpc.StatusCode = call.code()
    message = call.details() or code.name
    info = _info_of(call)
    if info is None:
        return _from_code(code, message)
    known = all_errors().get(info.reason)
    if known is None:
        error = _from_code(code, message)
        error.retryable = info.retryable
        return error
    return _made(known, message, info)


def to_info(error: CacheLinkError) -> pb.ErrorInfo:
    """An error as a field of a message."""
    diffs = error.diffs if isinstance(error, IdentityMismatch) else ()
    return pb.ErrorInfo(
        reason=error.reason,
        message=_fitting_message(str(error)),
        retryable=error.retryable,
        diffs=[
            pb.FieldDiff(field=_cut(d.field), ours=_cut(d.ours), theirs=_cut(d.theirs))
            for d in diffs[:_MOST_DIFFS]
        ],
    )


def from_info(info: pb.ErrorInfo) -> CacheLinkError:
    """The inverse of ``to_info``."""
    return _made(all_errors().get(info.reason, HandoffFailed), info.message, info)


def _made(cls: type[CacheLinkError], message: str, info: pb.ErrorInfo) -> CacheLinkError:
    if issubclass(cls, IdentityMismatch):
        return cls([FieldDiff(d.field, d.ours, d.theirs) for d in info.diffs], message)
    return cls(message)


def _info_of(call: Any) -> pb.ErrorInfo | None:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # the details contradict the code: not ours
        return None
    info = pb.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Is(pb.ErrorInfo.DESCRIPTOR) and detail.Unpack(info):
            return info
    return None


def _from_code(code: grpc.StatusCode, message: str) -> CacheLinkError:
    if code is grpc.StatusCode.INTERNAL and "from Core" in message:
        # The asynchronous client says this when the connection breaks during a write.
        return PeerGone(message)
    if code is grpc.StatusCode.UNAVAILABLE and "shutdown" in message.lower():
        return Draining(message)
    return _BY_CODE.get(code, InternalError)(f"{code.name}: {message}")


def _fitting_message(text: str) -> str:
    """Cuts a message so that it fits, also percent-encoded as gRPC sends it."""
    size = _MAX_MESSAGE_BYTES
    cut = text.encode()[:size].decode(errors="ignore")
    while len(quote(cut, safe=_UNESCAPED)) > _MAX_MESSAGE_BYTES:
        size = size * 3 // 4
        cut = text.encode()[:size].decode(errors="ignore")
    return cut if cut == text else cut[:-1] + "…"


_UNESCAPED: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def _trailer_bytes(status: status_pb2.Status) -> int:
    """Bytes of a status in the trailers: the message twice, the details in base64."""
    details_bytes: int = status.ByteSize()
    return len(quote(status.message, safe=_UNESCAPED)) + -(-details_bytes // 3) * 4


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"
