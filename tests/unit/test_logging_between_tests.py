"""What a program sets up in one test is gone in the next, whatever fixture ran it."""

from __future__ import annotations

import logging

import pytest

from cachelink_core import logs


@pytest.fixture(scope="module", autouse=True)
def _program():
    logs.install("error", "json")


@pytest.mark.parametrize("again", [False, True])
def test_a_warning_is_heard(caplog, again):
    logs.logger("cachelink_core.planted").warning("heard")
    assert "heard" in caplog.text
    if not again:
        logs.install("error", "console")
    assert not again or logging.getLogger().level != logging.ERROR
