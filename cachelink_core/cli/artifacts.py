"""What ``inspect`` and ``verify`` read: the files that CacheLink leaves on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cachelink_core import limits
from cachelink_core.cli.mapper_folder import CARD_FILE, MapperFolder, read_mapper_folder
from cachelink_core.cli.ping import describe_layers
from cachelink_core.codec_spec import codec_name
from cachelink_core.errors import DataLoss, InvalidRequest, ManifestError, UnknownCache
from cachelink_core.manifest import (
    Header,
    decode_header,
    digest,
    encode_header,
    header_from_json,
)

SPILL_SUFFIX: Final = ".safetensors"

_HEAD_BYTES: Final = 16
"""A safetensors file has the length of its JSON in eight bytes, then the brace that opens it."""

_MAX_FILE_BYTES: Final = 4 * limits.MAX_HEADER_BYTES
"""Base64, names and indentation make JSON larger than the header's own bytes."""

_CHECKED_BY_DECODING: Final = ("fields", "sizes", "tiling")


@dataclass(frozen=True, slots=True)
class HeaderFile:
    """A manifest's header, in its canonical bytes or as JSON.

    Attributes:
        path: of the file.
        form: ``msgpack`` or ``json``.
        header: as decoded and checked.
    """

    path: Path
    form: str
    header: Header

    @property
    def digest(self) -> str:
        """BLAKE3-256 of the manifest's canonical bytes, in hexadecimal."""
        return digest(encode_header(self.header)).hex()

    def summary(self) -> dict[str, object]:
        """What a person wants to know."""
        return {"manifest": f"{self.path.name}, {self.form}", **_described(self.header)}

    def document(self) -> dict[str, Any]:
        """The same for a program: the manifest itself and what follows from it."""
        return {"kind": "manifest", "form": self.form, **_derived(self.header)}

    def verify(self) -> dict[str, object]:
        """What was checked; decoding did it."""
        canonical = ["canonical bytes"] if self.form == "msgpack" else []
        return {"digest": self.digest, "checked": [*_CHECKED_BY_DECODING, *canonical]}


@dataclass(frozen=True, slots=True)
class SpilledFile:
    """A cache on disk, see ``engine/spill.py``.

    Attributes:
        path: of the file.
        header: of its manifest, its digest checked.
    """

    path: Path
    header: Header

    @property
    def digest(self) -> str:
        """BLAKE3-256 of the manifest's canonical bytes, in hexadecimal."""
        return digest(encode_header(self.header)).hex()

    def summary(self) -> dict[str, object]:
        """What a person wants to know."""
        size_bytes = self.path.stat().st_size
        return {"cache": f"{self.path.name}, {size_bytes} bytes", **_described(self.header)}

    def document(self) -> dict[str, Any]:
        """The same for a program."""
        size_bytes = self.path.stat().st_size
        return {"kind": "cache", "file_bytes": size_bytes, **_derived(self.header)}

    def verify(self) -> dict[str, object]:
        """Reads every tensor and checks its digest.

        Raises:
            DataLoss: it is not whole; the tensor is named.
        """
        from cachelink_core.engine.spill import verify_cache

        with _as_data_loss(self.path):
            _, tensors = verify_cache(self.path)
        return {
            "digest": self.digest,
            "checked": [*_CHECKED_BY_DECODING, "canonical bytes", "shapes", "tensor digests"],
            "tensors": tensors,
        }


Artifact = HeaderFile | SpilledFile | MapperFolder


def read_artifact(path: Path) -> Artifact:
    """Recognises a file, a mapper's folder, or the one cache of a folder, by what is in it.

    Raises:
        UnknownCache: there is nothing at that path.
        InvalidRequest: it cannot be read, or is none of ours.
        DataLoss: it is one of ours, and malformed.
        UnsupportedVersion: it needs a newer reader.
    """
    if not path.exists():
        raise UnknownCache(f"{path}: no such file or folder")
    if (path / CARD_FILE).is_file():
        return read_mapper_folder(path)
    if path.is_dir():
        path = _only_cache(path)
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head[8:9] == b"{" or path.suffix == SPILL_SUFFIX:
            return _read_spilled(path)
        return _read_header(path)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error


def _only_cache(folder: Path) -> Path:
    found = sorted(folder.glob(f"*{SPILL_SUFFIX}"))
    if len(found) != 1:
        names = ", ".join(each.name for each in found) or "none"
        raise InvalidRequest(f"{folder}: a folder with one {SPILL_SUFFIX} is read; it has {names}")
    return found[0]


def _read_spilled(path: Path) -> SpilledFile:
    from cachelink_core.engine.spill import read_header

    with _as_data_loss(path):
        return SpilledFile(path, read_header(path))


def _read_header(path: Path) -> HeaderFile:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} has more than {_MAX_FILE_BYTES} bytes: it is no manifest")
    # A header is a msgpack map, whose first byte is above 0x7F; JSON begins with a brace.
    as_json = data.lstrip()[:1] == b"{"
    with _as_data_loss(path):
        header = header_from_json(data) if as_json else decode_header(data)
    return HeaderFile(path, "json" if as_json else "msgpack", header)


@contextmanager
def _as_data_loss(path: Path) -> Iterator[None]:
    """At rest a malformed manifest is no caller's mistake: the file is not what was written."""
    try:
        yield
    except ManifestError as error:
        raise DataLoss(f"{path}: {error}") from error


def _described(header: Header) -> dict[str, object]:
    identity, layout = header.identity, header.layout
    ids = " ".join(map(str, header.ids[:8])) + (" …" if header.tokens > 8 else "")
    return {
        "digest": digest(encode_header(header)).hex(),
        "schema": f"{header.schema_version}, readable from {header.min_reader_version}",
        "handoff": header.handoff_id,
        "sender epoch": header.sender_epoch,
        "model": f"{identity.architecture}, {identity.dtype}, identity {identity.digest()}",
        "layers": describe_layers(identity.layers),
        "tokens": f"{header.tokens}: {ids}",
        "blocks": f"{layout.block_count} of {header.block_tokens} tokens, "
        f"{len(header.runs)} runs, {layout.chunk_count} chunks",
        "codec": f"{codec_name(header.codec, header.packing)}, {header.space} space, "
        f"trust {header.trust}",
        "mapper": header.mapper,
        "payload": f"{layout.encoded_bytes} bytes before packing, native {layout.native_bytes}",
        "query frame": f"{header.query_frame.before!r} … {header.query_frame.after!r}",
        "lease": f"{header.lease_s:g} s",
    }


def _derived(header: Header) -> dict[str, Any]:
    layout = header.layout
    return {
        "digest": digest(encode_header(header)).hex(),
        "identity_digest": header.identity.digest(),
        "tokens": header.tokens,
        "chunk_count": layout.chunk_count,
        "encoded_bytes": layout.encoded_bytes,
        "native_bytes": layout.native_bytes,
        "manifest": msgspec.to_builtins(header),
    }
