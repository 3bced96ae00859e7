"""The ways of moving the bytes: one row of the table each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from cachelink_core.errors import ConfigError
from cachelink_core.rpc.transfer_types import SCHEMES


class Row(msgspec.Struct, frozen=True):
    """One way.

    Attributes:
        key: on the command line and in results.
        name: in tables.
        module: of its ends.
        pair: rows of one name share their processes.
        options: of its ends, at their start and in every run.
        environment: variables of its processes.
        package: the distribution that it needs beside CacheLink's own.
        server: whether a third process stands beside the receiver.
        ours: whether it is CacheLink.
    """

    key: str
    name: str
    module: str
    pair: str
    options: dict[str, str] = {}
    environment: dict[str, str] = {}
    package: str = ""
    server: bool = False
    ours: bool = False


_ENDS: Final = "cachelink_bench.peers."
_MOONCAKE: Final = {"MC_FORCE_TCP": "1"}
_UCX: Final = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "ERROR"}


def _alone(key: str, name: str, module: str, **more: object) -> Row:
    fields = {"key": key, "name": name, "module": _ENDS + module, "pair": key, **more}
    return msgspec.convert(fields, Row)


SOCKET: Final = _alone("socket", "plain socket, digest of the whole", "plain_socket")
"""The measure: it runs before and after every other run."""

_OTHERS: Final = (
    _alone("socket-again", "plain socket, as a row", "plain_socket"),
    _alone("framed", "framed socket, digest per MiB", "framed"),
    _alone("grpc", "bare gRPC stream", "grpc_stream"),
    _alone(
        "nixl",
        "NIXL, progress thread off",
        "nixl",
        options={"progress_thread": "off"},
        environment=_UCX,
        package="nixl-cu12",
    ),
    _alone(
        "nixl-default",
        "NIXL, defaults",
        "nixl",
        options={"progress_thread": "on"},
        environment=_UCX,
        package="nixl-cu12",
    ),
    _alone(
        "mooncake",
        "Mooncake, defaults",
        "mooncake",
        environment=_MOONCAKE,
        package="mooncake-transfer-engine-non-cuda",
    ),
    _alone(
        "mooncake-1mib",
        "Mooncake, 1 MiB slices",
        "mooncake",
        environment=_MOONCAKE | {"MC_TCP_SLICE_SIZE": "1048576"},
        package="mooncake-transfer-engine-non-cuda",
    ),
    _alone(
        "mooncake-v1",
        "Mooncake, v1 without acknowledgement",
        "mooncake",
        environment=_MOONCAKE | {"MC_TCP_PROTO": "1"},
        package="mooncake-transfer-engine-non-cuda",
    ),
    _alone(
        "lmcache",
        "LMCache lm://, put and get",
        "lmcache",
        environment={"LMCACHE_LOG_LEVEL": "ERROR"},
        package="lmcache",
        server=True,
    ),
)

OURS: Final = ("native", "native-no-digests", "int8", "int4")

DEFAULT_ROWS: Final = (
    *(row.key for row in _OTHERS if row.key != "mooncake-v1"),
    *OURS,
)

ALL_ROWS: Final = (*(row.key for row in _OTHERS), *OURS)

PLANES: Final[tuple[str, ...]] = SCHEMES


def make_rows(keys: Sequence[str], planes: Sequence[str], dtype: str) -> list[Row]:
    """The rows of these keys; those of CacheLink once for each data plane.

    Args:
        keys: of ``ALL_ROWS``.
        planes: schemes of data planes.
        dtype: of the model, by which native caches are named.

    Raises:
        ConfigError: an unknown key or plane.
    """
    others = {row.key: row for row in _OTHERS}
    unknown = [key for key in keys if key not in ALL_ROWS]
    if unknown:
        raise ConfigError(f"--rows has {unknown[0]!r}; known: {', '.join(ALL_ROWS)}")
    odd = [plane for plane in planes if plane not in SCHEMES]
    if odd:
        raise ConfigError(f"--planes has {odd[0]!r}; known: {', '.join(SCHEMES)}")
    rows = [others[key] for key in keys if key in others]
    rows += [_ours(key, plane, dtype) for plane in planes for key in keys if key in OURS]
    return rows


def _ours(key: str, plane: str, dtype: str) -> Row:
    codec = key.removesuffix("-no-digests")
    off = codec != key
    named = {"native": {"bfloat16": "bf16"}.get(dtype, dtype)}.get(codec, codec)
    return Row(
        key=f"{key}@{plane}",
        name=f"CacheLink {named} ({plane}){', digests off' if off else ''}",
        module=f"{_ENDS}cachelink",
        pair="cachelink",
        options={"codec": codec, "plane": plane, "digests": "off" if off else "on"},
        ours=True,
    )
