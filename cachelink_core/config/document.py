"""The table of options in a daemon's README, which a test compares with the fields."""

from __future__ import annotations

import json

from cachelink_core.config.daemon import DaemonConfig
from cachelink_core.config.loading import options


def options_table(cls: type[DaemonConfig]) -> str:
    """One Markdown row an option: its flag, its default as in the file, what it means.

    The environment name follows from the flag and is not repeated.
    """
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in options(cls):
        default = option.default if isinstance(option.default, str) else json.dumps(option.default)
        rows.append(f"| `{option.flag}` | `{default}` | {option.help} |")
    return "\n".join(rows)
