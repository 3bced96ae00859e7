"""The system's tools, each with a deadline, and what must be there before anything is made."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from cachelink_core.errors import ConfigError, InternalError

_DEADLINE_S: Final = 20.0

_PACKAGES: Final = {"ip": "iproute2", "tc": "iproute2", "iperf3": "iperf3"}
"""Tool → Debian package."""


def check_tools() -> None:
    """Makes sure that a link can be emulated here.

    Raises:
        ConfigError: not root, or a tool is missing.
    """
    if os.geteuid() != 0:
        raise ConfigError("--emulate makes network namespaces, which needs root")
    for tool, package in _PACKAGES.items():
        if shutil.which(tool) is None:
            raise ConfigError(f"--emulate needs {tool}, which is not here (Debian: {package})")


def run_tool(*command: str, deadline_s: float = _DEADLINE_S) -> str:
    """Runs a tool; returns its standard output.

    Raises:
        InternalError: it failed or did not end; the message has its last line.
    """
    done = try_tool(command, deadline_s)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise InternalError(f"{' '.join(command)}: {said or f'status {done.returncode}'}")
    return done.stdout


def try_tool(
    command: Sequence[str], deadline_s: float = _DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Runs a tool that may fail.

    Raises:
        InternalError: it did not end.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InternalError(f"{' '.join(command)} did not end in {deadline_s:g} s") from error
