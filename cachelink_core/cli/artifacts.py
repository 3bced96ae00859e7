"""What ``inspect`` and ``verify`` read: the files that CacheLink leaves on a disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cachelink_core import limits
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
        """BLAKE3-256 of the canonical bytes, in hexadecimal."""
        return digest(encode_header(self.header)).hex()

    def summary(self) -> dict[str, object]:
        """What a person wants to know."""
        header, identity = self.header, self.header.identity
        ids = " ".join(map(str, header.ids[:8])) + (" …" if header.tokens > 8 else "")
        return {
            "manifest": f"{self.path.name}, {self.form}, schema {header.schema_version}, "
            f"readable from {header.min_reader_version}",
            "digest": self.digest,
            "handoff": header.handoff_id,
            "sender epoch": header.sender_epoch,
            "model": f"{identity.architecture}, {identity.dtype}, identity {identity.digest()}",
            "layers": describe_layers(identity.layers),
            "tokens": f"{header.tokens}: {ids}",
            "blocks": f"{header.layout.block_count} of {header.block_tokens} tokens, "
            f"{len(header.runs)} runs, {header.layout.chunk_count} chunks",
            "codec": f"{codec_name(header.codec, header.packing)}, {header.space} space, "
            f"trust {header.trust}",
            "mapper": header.mapper,
            "payload": f"{header.layout.encoded_bytes} bytes before packing, "
            f"native {header.layout.native_bytes}",
            "query frame": f"{header.query_frame.before!r} … {header.query_frame.after!r}",
            "lease": f"{header.lease_s:g} s",
        }

    def document(self) -> dict[str, Any]:
        """The same for a program: the manifest itself and what follows from it."""
        layout = self.header.layout
        return {
            "kind": "manifest",
            "form": self.form,
            "digest": self.digest,
            "identity_digest": self.header.identity.digest(),
            "tokens": self.header.tokens,
            "chunk_count": layout.chunk_count,
            "encoded_bytes": layout.encoded_bytes,
            "native_bytes": layout.native_bytes,
            "manifest": msgspec.to_builtins(self.header),
        }

    def verify(self) -> dict[str, object]:
        """What was checked. Decoding has checked fields, sizes, tiling and canonical bytes."""
        return {
            "digest": self.digest,
            "chunk_count": self.header.layout.chunk_count,
            "checked": ["fields", "sizes", "tiling", "canonical bytes"],
        }


Artifact = HeaderFile


def read_artifact(path: Path) -> Artifact:
    """Recognises a file or folder by what is in it.

    Raises:
        UnknownCache: there is nothing at that path.
        InvalidRequest: it cannot be read, or is none of ours.
        DataLoss: it is one of ours, and malformed.
        UnsupportedVersion: it needs a newer reader.
    """
    if not path.exists():
        raise UnknownCache(f"{path}: no such file or folder")
    if path.is_dir():
        raise InvalidRequest(f"{path}: a folder without anything of CacheLink in it")
    try:
        data = _read(path)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    # A header is a msgpack map, whose first byte is above 0x7F; JSON begins with a brace.
    as_json = data.lstrip()[:1] == b"{"
    try:
        header = header_from_json(data) if as_json else decode_header(data)
    except ManifestError as error:
        raise DataLoss(f"{path}: {error}") from error
    return HeaderFile(path, "json" if as_json else "msgpack", header)


def _read(path: Path) -> bytes:
    """The file's bytes; base64 and indentation make JSON larger than the header itself."""
    limit = 4 * limits.MAX_HEADER_BYTES
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise InvalidRequest(f"{path} has more than {limit} bytes: it is no manifest")
    return data
