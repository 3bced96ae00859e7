"""Writes everything that is generated: ``python proto/generate.py [--check]``.

- ``cachelink_core/rpc/pb``: messages, services and their type stubs, from ``proto/cachelink/v1``;
- the state diagram and the table of errors in ``proto/README.md``, between markers;
- ``manifests/handoff.schema.json``, the JSON Schema of a manifest's header.

The files are compiled with a plain ``-I proto``, so that any other language compiles the very same
ones; the imports in the Python output are then rewritten to its place in this package.
``--check`` compares and writes nothing; it exits with 1 if a file differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cachelink_core import handoff, manifest  # noqa: E402
from cachelink_core.errors import CacheLinkError, all_errors  # noqa: E402

PROTO = ROOT / "proto"
SPEC = PROTO / "README.md"
SCHEMA = ROOT / "manifests" / "handoff.schema.json"
PACKAGE = "cachelink_core/rpc/pb"
FOLDERS = {
    "": "Code generated from proto/ by proto/generate.py.",
    "cachelink": "The proto package ``cachelink``, generated.",
    "cachelink/v1": "The proto package ``cachelink.v1``, generated.",
}
Outputs = dict[Path, bytes]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    outputs = generate()
    if parser.parse_args().check:
        stale = stale_files(outputs)
        for path in stale:
            print(f"out of date: {path.relative_to(ROOT)}")
        return 1 if stale else 0
    for path, data in outputs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    print(f"{len(outputs)} files written")
    return 0


def generate() -> Outputs:
    """Every generated file with its bytes."""
    return {**protobuf_code(), SCHEMA: schema_json().encode(), SPEC: specification().encode()}


def stale_files(outputs: Outputs) -> list[Path]:
    """Files that differ from what is generated now, and generated files that no source has."""
    differing = [
        path for path, data in outputs.items() if not path.exists() or path.read_bytes() != data
    ]
    there = {path for path in (ROOT / PACKAGE).rglob("*.py*") if path.suffix in {".py", ".pyi"}}
    return sorted(differing) + sorted(there - outputs.keys())


def protobuf_code() -> Outputs:
    """Compiles the schema and rewrites the imports."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    outputs: Outputs = {
        ROOT / PACKAGE / folder / "__init__.py": f'"""{text}"""\n'.encode()
        for folder, text in FOLDERS.items()
    }
    with tempfile.TemporaryDirectory() as out:
        flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *flags, *sources]
        run(command)
        for path in Path(out).rglob("*.py*"):
            text = rewritten(path.read_text("utf-8"))
            outputs[ROOT / PACKAGE / path.relative_to(out)] = text.encode()
    return outputs


def run(command: list[str]) -> None:
    """Runs the compiler; its plugins lie beside the interpreter, which may not be on the path."""
    beside = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")])}
    done = subprocess.run(command, cwd=PROTO, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"protoc failed:\n{done.stderr}")


def rewritten(text: str) -> str:
    """Generated code with the imports of its new place."""
    package = PACKAGE.replace("/", ".")
    return text.replace("from cachelink.v1 import", f"from {package}.cachelink.v1 import")


def schema_json() -> str:
    """The JSON Schema of a header."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "CacheLink handoff manifest: header",
        **manifest.header_schema(),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def specification() -> str:
    """proto/README.md with its generated parts as they are now."""
    text = SPEC.read_text("utf-8")
    text = between(text, "states", f"```mermaid\n{handoff.diagram()}\n```")
    return between(text, "errors", error_table())


def between(text: str, name: str, block: str) -> str:
    """Replaces what stands between the markers of ``name``."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end of generated: {name} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{SPEC.relative_to(ROOT)} has no markers for {name!r}")
    return f"{head}{begin}\n{block}\n{end}{tail}"


def error_table() -> str:
    """Every error with the status and the meaning that a peer sees."""
    lines = ["| reason | gRPC status | retryable | meaning |", "|---|---|---|---|"]
    for reason, cls in sorted(all_errors().items()):
        if cls is CacheLinkError:
            continue
        meaning = (cls.__doc__ or "").splitlines()[0]
        retry = "yes" if cls.retryable else "no"
        lines.append(f"| `{reason}` | {cls.status} | {retry} | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
