"""Every failure has an exit code, and the help names each of them."""

import pytest

from cachelink_core import errors
from cachelink_core.cli.exit_codes import BY_STATUS, MEANINGS, ExitCode, epilog, exit_code


def test_every_status_of_an_error_has_an_exit_code():
    assert {cls.status for cls in errors.all_errors().values()} <= BY_STATUS.keys()


def test_no_failure_exits_as_success_or_as_an_interrupt():
    assert not {ExitCode.OK, ExitCode.INTERRUPTED} & set(BY_STATUS.values())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InternalError("x"), 1),
        (errors.HandoffFailed("x"), 1),
        (errors.InvalidRequest("x"), 2),
        (errors.UnknownCodec("x"), 2),
        (errors.IdentityMismatch(message="x"), 3),
        (errors.InsufficientTrust("x"), 3),
        (errors.DuplicateHandoff("x"), 3),
        (errors.UnknownCache("x"), 4),
        (errors.StillInTransfer("x"), 4),
        (errors.PeerGone("x"), 5),
        (errors.LinkTimeout("x"), 5),
        (errors.Draining("x"), 5),
        (errors.BudgetExceeded("x"), 6),
        (errors.ChecksumMismatch("x"), 7),
        (errors.TruncatedStream("x"), 7),
        (errors.Denied("x"), 8),
        (errors.Unauthenticated("x"), 8),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_has_the_documented_code(error, code):
    assert exit_code(error) == code


def test_the_help_has_every_code():
    lines = epilog().splitlines()
    assert MEANINGS.keys() == set(ExitCode)
    for code in ExitCode:
        assert f"{code.value:>3}  {MEANINGS[code]}" in lines
