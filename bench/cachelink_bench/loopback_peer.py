"""The receiving process, as the sending one sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachelink_bench.order_process import OrderProcess


class ReceiverProcess(OrderProcess):
    """Runs ``loopback_receiver``; a context manager that ends it.

    Attributes:
        ends: where each arm is served, by name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        """Starts it and waits until it serves.

        Raises:
            ConfigError: it did not come up; its own message is on standard error.
        """
        super().__init__("cachelink_bench.loopback_receiver", arguments)
        self.ends: dict[str, Any] = self.ready
