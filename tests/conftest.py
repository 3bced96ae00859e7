"""What holds for every test."""

from __future__ import annotations

import logging
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Tests that run in the background of a shell ignore Ctrl-C, and so would every child they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """A program that a test runs in this process sets up its logs; the next test starts without."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    if root.level == level and root.handlers == handlers:
        return
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    logging.captureWarnings(capture=False)
