"""Errors become statuses and errors again."""

import grpc
import pytest
from grpc_status import rpc_status

from cachelink_core import errors, limits
from cachelink_core.errors import CacheLinkError, IdentityMismatch, all_errors
from cachelink_core.identity import FieldDiff
from cachelink_core.rpc import status

DIFFS = (FieldDiff("weights_digest", "a" * 64, "b" * 64), FieldDiff("dtype", "float32", "bf16"))
CLASSES = sorted(set(all_errors().values()) - {CacheLinkError}, key=lambda cls: cls.reason)


class FailedCall(grpc.RpcError):
    """What gRPC raises, made of what it would have received."""

    def __init__(self, code, details, trailers=()):
        super().__init__()
        self._parts = code, details, trailers

    def code(self):
        return self._parts[0]

    def details(self):
        return self._parts[1]

    def trailing_metadata(self):
        return self._parts[2]


def over_the_wire(error: CacheLinkError) -> CacheLinkError:
    sent = rpc_status.to_status(status.to_status(error))
    return status.error_from(FailedCall(sent.code, sent.details, sent.trailing_metadata))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_comes_back_as_itself(cls):
    error = cls(DIFFS, "what") if cls is IdentityMismatch else cls("what")
    came = over_the_wire(error)
    assert type(came) is cls
    assert str(came) == "what"
    assert came.retryable == cls.retryable
    assert grpc.StatusCode[cls.status] is rpc_status.to_status(status.to_status(error)).code


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_survives_as_a_field(cls):
    error = cls(DIFFS) if cls is IdentityMismatch else cls("what")
    came = status.from_info(status.to_info(error))
    assert type(came) is cls
    assert str(came) == str(error)


def test_diffs_come_back_field_by_field():
    came = over_the_wire(IdentityMismatch(DIFFS))
    assert isinstance(came, IdentityMismatch)
    assert came.diffs == DIFFS
    assert f"weights_digest: ours {'a' * 64}, theirs {'b' * 64}" in str(came)
    assert "2 fields" in str(came)


@pytest.mark.parametrize(
    "error",
    [
        IdentityMismatch([FieldDiff(f"layers[{i}].kv_heads", "8", "4") for i in range(1000)]),
        IdentityMismatch([FieldDiff("rope", "x" * 100_000, "é" * 100_000)]),
        errors.InvalidRequest("€" * 50_000),
        errors.InvalidRequest("%" * 50_000),
        errors.InvalidRequest("\n" * 50_000),
    ],
)
def test_a_long_refusal_is_cut_to_what_trailers_carry(error):
    sent = rpc_status.to_status(status.to_status(error))
    trailers = sum(len(key) + len(value) for key, value in sent.trailing_metadata)
    assert trailers < limits.MAX_STATUS_BYTES
    came = over_the_wire(error)
    assert type(came) is type(error)
    assert str(came).endswith("…")
    if isinstance(error, IdentityMismatch):
        assert came.diffs
        assert came.diffs[0].field == error.diffs[0].field


@pytest.mark.parametrize(
    ("code", "details", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", errors.PeerGone),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.LinkTimeout),
        (grpc.StatusCode.CANCELLED, "Locally cancelled", errors.HandoffAborted),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", errors.PeerGone),
        (grpc.StatusCode.INTERNAL, "anything else", errors.InternalError),
        (grpc.StatusCode.UNKNOWN, "Exception calling application", errors.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.UnsupportedVersion),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max", errors.ResourceExhausted),
    ],
)
def test_a_status_of_grpc_itself_has_a_class(code, details, cls):
    came = status.error_from(FailedCall(code, details))
    assert type(came) is cls
    assert details in str(came)


def test_a_reason_of_a_newer_peer_keeps_its_code_and_whether_to_retry():
    sent = status.to_status(errors.UnknownCache("gone"))
    info = status.to_info(errors.UnknownCache(""))
    info.reason, info.retryable = "moved_elsewhere", True
    sent.details[0].Pack(info)
    call = rpc_status.to_status(sent)
    came = status.error_from(FailedCall(call.code, call.details, call.trailing_metadata))
    assert type(came) is errors.UnknownCache
    assert came.retryable
    assert not errors.UnknownCache.retryable


def test_details_that_contradict_the_code_are_not_believed():
    call = rpc_status.to_status(status.to_status(errors.UnknownCache("gone")))
    came = status.error_from(
        FailedCall(grpc.StatusCode.UNAVAILABLE, "gone", call.trailing_metadata)
    )
    assert type(came) is errors.PeerGone
