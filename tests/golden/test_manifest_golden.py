"""The example manifests, both ways: JSON to bytes and bytes to JSON. A missing file is a failure."""

import base64
import json
import re
from pathlib import Path

import jsonschema
import pytest

from cachelink_core import manifest
from cachelink_core.manifest import decode_header, encode_header, header_from_json, header_to_json

FOLDER = Path(__file__).resolve().parents[2] / "manifests"
EXAMPLES = ("exact", "int4-zstd", "mapped")
SCHEMA = json.loads((FOLDER / "handoff.schema.json").read_text("utf-8"))
README = (FOLDER / "README.md").read_text("utf-8")


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.json").read_text("utf-8")


def bytes_of(name: str) -> bytes:
    return (FOLDER / f"{name}.msgpack").read_bytes()


def test_every_file_there_is_an_example():
    names = {path.stem for path in FOLDER.glob("*.json")} - {"handoff.schema"}
    assert names == set(EXAMPLES) == {path.stem for path in FOLDER.glob("*.msgpack")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_gives_the_committed_bytes(name):
    assert encode_header(header_from_json(text_of(name))) == bytes_of(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_committed_bytes_give_the_json(name):
    assert header_to_json(decode_header(bytes_of(name))) + "\n" == text_of(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_validates_against_the_committed_schema(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads(text_of(name)), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("codec", "id"), "int2"),
        (("handoff_id",), "a b"),
        (("identity", "layers"), []),
        (("lease_s",), 601.0),
        (("unknown",), 1),
    ],
)
def test_the_schema_refuses_what_the_code_refuses(path, value):
    document = json.loads(text_of("exact"))
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)
    with pytest.raises(manifest.ManifestError):
        header_from_json(json.dumps(document))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_annotations_say_what_is_there(name):
    """Sizes, digests and chunks in README.md are those of the files."""
    header = decode_header(bytes_of(name))
    section = README.partition(f"## {name}.json")[2].partition("\n## ")[0]
    assert manifest.digest(bytes_of(name)).hex() in section
    chunks = re.findall(r"^\| (\d+) \| (\d+) \| ([\d,]+) \|", section, re.MULTILINE)
    assert [(int(b), int(r), int(size.replace(",", ""))) for b, r, size in chunks] == [
        (block, run, header.layout.raw_bytes(block, run)) for block, run in header.layout.chunks()
    ]
    for number in (len(bytes_of(name)), header.layout.native_bytes, header.layout.encoded_bytes):
        assert f"{number:,}" in section
    assert f"`{header.trust}`" in section


def test_every_field_of_a_header_is_annotated():
    fields = re.findall(r"^\| `([a-z_]+)` \|", README, re.MULTILINE)
    assert fields == list(manifest.Header.__struct_fields__)


def test_ids_of_an_example_are_read_without_this_code():
    document = json.loads(text_of("exact"))
    raw = base64.b64decode(document["token_ids"])
    ids = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
    assert tuple(ids) == decode_header(bytes_of("exact")).ids
    assert ids[:3] == [1, 9690, 198]
