"""What a client or a protocol tool imports stays light."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "pydantic", "prometheus_client")


def loaded_by(module: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after importing ``module``."""
    code = f"import sys, {module}; print(*sorted({{n.partition('.')[0] for n in sys.modules}}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "cachelink_core.rpc.client",
        "cachelink_core.rpc.transfer_client",
        "cachelink_core.rpc.server",
        "cachelink_core.handoff",
        "cachelink_core.manifest",
    ],
)
def test_no_model_runtime_is_loaded(module):
    assert not loaded_by(module) & set(HEAVY)


@pytest.mark.parametrize("module", ["cachelink_core.handoff", "cachelink_core.names"])
def test_the_protocol_without_io_loads_no_grpc(module):
    assert not loaded_by(module) & {"grpc", "google", "asyncio", "socket", "numpy"}


def test_the_check_sees_what_is_loaded():
    assert {"grpc", "google"} <= loaded_by("cachelink_core.rpc.client")
