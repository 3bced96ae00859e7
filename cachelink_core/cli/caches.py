"""``cachelink caches`` and ``cachelink evict``: what a node holds."""

from __future__ import annotations

from typing import Annotated

import typer

from cachelink_core.cli.connection import (
    DEFAULT_RECEIVER,
    CaOption,
    CertificateOption,
    Connection,
    JsonOption,
    KeyOption,
    NodeOption,
    TlsOption,
    TokenOption,
)
from cachelink_core.cli.output import columns, console, megabytes, print_json, reporting
from cachelink_core.rpc.client import CacheList


@reporting
def caches(
    node: NodeOption = DEFAULT_RECEIVER,
    tls: TlsOption = False,
    tls_ca: CaOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: KeyOption = None,
    token_file: TokenOption = None,
    json_output: JsonOption = False,
) -> None:
    """List the caches that a node holds, and the bytes of its store."""
    connection = Connection(tls, tls_ca, tls_certificate, tls_key, token_file)
    with connection.node(node) as client:
        found = client.caches()
    if json_output:
        print_json(found)
    else:
        _show(found)


@reporting
def evict(
    cache_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Caches to drop.")],
    node: NodeOption = DEFAULT_RECEIVER,
    tls: TlsOption = False,
    tls_ca: CaOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: KeyOption = None,
    token_file: TokenOption = None,
    json_output: JsonOption = False,
) -> None:
    """Drop caches from a node. An answer that is reading one ends first."""
    connection = Connection(tls, tls_ca, tls_certificate, tls_key, token_file)
    freed: dict[str, int] = {}
    with connection.node(node) as client:
        for cache_id in cache_ids:
            freed[cache_id] = client.evict(cache_id)
            if not json_output:
                console().print(f"{cache_id}: {megabytes(freed[cache_id])} freed at once")
    if json_output:
        print_json({"freed_bytes": freed})


def _show(found: CacheList) -> None:
    table = columns("cache", "handoff", "tokens", "size", "trust", "codec", "age", "idle", "pins")
    for cache in found.caches:
        table.add_row(
            cache.cache_id,
            cache.handoff_id or "-",
            str(cache.tokens),
            megabytes(cache.bytes),
            cache.trust,
            cache.codec or "-",
            f"{cache.age_s:.0f} s",
            f"{cache.idle_s:.0f} s",
            str(cache.pins),
        )
    console().print(table)
    console().print(
        f"{len(found.caches)} caches; used {megabytes(found.used_bytes)}, "
        f"reserved {megabytes(found.reserved_bytes)}, budget {megabytes(found.budget_bytes)}"
    )
