"""What a result depends on beside its configuration: versions and the machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from cachelink_core import __version__

PACKAGES = ("torch", "transformers", "numpy", "zstandard", "grpcio", "protobuf")


def environment() -> dict[str, object]:
    """Versions, processor and threads, as plain data for a result file."""
    return {
        "cachelink": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _version(package: str) -> str | None:
    """None for a package that is not there: a benchmark of tensors alone runs without gRPC."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
            return next(names, platform.processor()).strip()
    except OSError:
        return platform.processor()
