"""Both ends of an emulated link are removed, whatever one of them says. The system's tools are scripts."""

from __future__ import annotations

import os

import pytest

from cachelink_bench.emulation.namespaces import emulated_link
from cachelink_bench.emulation.spec import parse_link
from cachelink_core.errors import InternalError

TOOL = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in
    "netns list") printf '%s\\n' {names} ;;
    "netns delete "*-{stuck}) echo "busy" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize("stuck", ["sender", "receiver"])
def test_an_end_that_cannot_be_removed_does_not_keep_the_other(tmp_path, monkeypatch, stuck):
    names = [f"cachelink-{os.getpid()}-{side}" for side in ("sender", "receiver")]
    log = tmp_path / "log"
    for tool in ("ip", "tc", "iperf3"):
        script = tmp_path / tool
        script.write_text(TOOL.format(log=log, names=" ".join(names), stuck=stuck))
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    wanted = f"ip netns delete cachelink-{os.getpid()}-{stuck}: busy"
    with pytest.raises(InternalError, match=wanted), emulated_link(parse_link("1gbit")):
        pass
    tried = [line.split()[-1] for line in log.read_text().splitlines() if " delete " in line]
    assert sorted(tried) == sorted(names)
