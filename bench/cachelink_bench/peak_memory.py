"""How much memory a call takes at its peak, beside what was there before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Runs ``call`` and measures.

    On a GPU these are torch's allocations. On a CPU it is the process's resident memory, which
    Linux can be told to track afresh; pages that the allocator kept from earlier calls do not count,
    so the first call of a process is the honest one.

    Returns:
        Bytes; None where the system does not say.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    try:
        _RESET.write_text("5", encoding="ascii")
        resident = _kib("VmRSS")
        call()
        return (_kib("VmHWM") - resident) * 1024
    except (OSError, StopIteration):
        call()
        return None


def _kib(field: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])
