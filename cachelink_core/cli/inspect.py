"""``cachelink inspect`` and ``cachelink verify``: what a file on disk is, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachelink_core.cli.artifacts import read_artifact
from cachelink_core.cli.connection import JsonOption
from cachelink_core.cli.output import console, facts, print_json, reporting
from cachelink_core.errors import ChecksumMismatch

PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A manifest (.msgpack, .json), a spilled cache, or a mapper's folder."
    ),
]


@reporting
def inspect(path: PathArgument, json_output: JsonOption = False) -> None:
    """Show what a manifest, a spilled cache or a mapper holds."""
    artifact = read_artifact(path)
    if json_output:
        print_json(artifact.document())
    else:
        console().print(facts(artifact.summary()))


@reporting
def verify(
    path: PathArgument,
    digest: Annotated[
        str | None, typer.Option(metavar="HEX", help="The digest that it must have.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check a manifest, a spilled cache or a mapper, digests included; exits 7 if it is not whole."""
    artifact = read_artifact(path)
    checked = artifact.verify()
    if digest is not None and digest.lower() != artifact.digest:
        raise ChecksumMismatch(f"{path}: digest {artifact.digest}, expected {digest}")
    if json_output:
        print_json({"ok": True, "path": str(path), **checked})
    else:
        console().print(f"{path}: whole, digest {artifact.digest}")
