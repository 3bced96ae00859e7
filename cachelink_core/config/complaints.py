"""What is wrong with a configuration, in words that name the option, its value and its origin."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError


def complaints(
    error: ValidationError, layers: Mapping[str, Any], known: Sequence[str]
) -> Iterator[str]:
    """One sentence for each thing that is wrong: the option, its value, its origin, the reason.

    Args:
        error: what validation found.
        layers: where values came from, the strongest last: a label and the values of it.
        known: all option names, for suggestions.
    """
    for item in error.errors(include_url=False, include_context=False):
        path = [str(part) for part in item["loc"]]
        name = ".".join(path)
        origin = _origin(path, layers)
        if item["type"] == "extra_forbidden":
            yield f"{name} ({origin}) is not an option{_suggestion(name, known)}"
            continue
        message = item["msg"].removeprefix("Value error, ")
        if not path:
            yield message
            continue
        yield f"{name}{_shown(path, item['input'])} ({origin}): {message}"


def _shown(path: Sequence[str], value: object) -> str:
    """The value in a message, unless a secret may be in it."""
    if isinstance(value, (dict, list)) or {"token", "tokens"} & set(path):
        return ""
    return f" = {json.dumps(value, default=str, ensure_ascii=False)}"


def _origin(path: Sequence[str], layers: Mapping[str, Any]) -> str:
    """The highest layer that says something at or above this place."""
    for label in reversed(list(layers)):
        place: object = layers[label]
        for part in path:
            if not isinstance(place, dict) or part not in place:
                break
            place = place[part]
        else:
            return label
    return "default"


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
