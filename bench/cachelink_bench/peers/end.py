"""One process of a pair: makes its end, says where it is, and obeys (``order_process.py``)."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from cachelink_bench.order_process import die_with_parent, reply, serve_orders, take_stdout
from cachelink_bench.peers.place import Place, Prepared, Receiving, Sending
from cachelink_core import logs

_CLASSES: Final = {"sender": "Sender", "receiver": "Receiver", "server": "Server"}

Reply = Mapping[str, object]


def main() -> None:
    """Serves the place that the first argument describes, until standard input ends."""
    replies = take_stdout()
    die_with_parent()
    logs.install("error", "console")
    place = msgspec.json.decode(sys.argv[1], type=Place)
    try:
        module = importlib.import_module(place.module)
        end = getattr(module, _CLASSES[place.side])(place)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is why the peer is left out
        reply(replies, error=_reason(error))
        _leave(1)
    # A collection before each run then looks at what the runs left, not at all of torch.
    gc.freeze()
    reply(replies, address=getattr(end, "address", None))
    serve_orders(replies, _obeying(end))
    end.close()
    _leave(0)


def _obeying(end: Any) -> Callable[[dict[str, Any]], Reply]:
    def obey(order: dict[str, Any]) -> Reply:
        try:
            return _obey(end, order)
        except Exception as error:  # noqa: BLE001 - a peer may raise anything
            return {"error": _reason(error)}

    return obey


def _obey(end: Any, order: dict[str, Any]) -> Reply:
    sender: Sending = end
    receiver: Receiving = end
    match order:
        case {"do": "load", "stem": stem}:
            sender.load(Path(stem))
            return {}
        case {"do": "prepare", "run": run, "options": options}:
            gc.collect()
            return _plain(sender.prepare(run, options))
        case {"do": "expect", "prepared": prepared, "options": options}:
            gc.collect()
            receiver.expect(msgspec.convert(prepared, Prepared), options)
            return {}
        case {"do": "send"}:
            return _plain(sender.send())
        case {"do": "found", "name": name}:
            return {"digest": receiver.found(name)}
    raise ValueError(f"unknown order {order}")


def _plain(value: object) -> Reply:
    plain: Reply = msgspec.to_builtins(value)
    return plain


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _leave(status: int) -> None:
    """Ends at once: NIXL crashes when the interpreter tears down what it made."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
