"""What holds for every test."""

from __future__ import annotations

import logging
import signal

import pytest

from cachelink_core import logs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Tests that run in the background of a shell ignore Ctrl-C, and so would every child they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_ROOT = logging.getLogger()
_LEVEL = _ROOT.level


@pytest.fixture(autouse=True)
def _logging_as_pytest_set_it_up():
    """A program that a test or a wider fixture runs in this process sets up its logs; no test sees that."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    _ROOT.setLevel(_LEVEL)
    for handler in [each for each in _ROOT.handlers if type(each).__module__ == logs.__name__]:
        _ROOT.removeHandler(handler)
    logging.captureWarnings(capture=False)
