"""The generated code is what the schema gives, and the schema keeps its promises."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from cachelink_core import limits
from cachelink_core.codec_spec import CodecSpec
from cachelink_core.identity import LayerGeometry, ModelIdentity
from cachelink_core.manifest import Header, Seal, SenderTimings
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2, receiver_pb2, sender_pb2, transfer_pb2

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = Path(__file__).parent / "field_numbers.json"
FILES = [module.DESCRIPTOR for module in (common_pb2, receiver_pb2, sender_pb2, transfer_pb2)]
MESSAGES: list[Descriptor] = [m for f in FILES for m in f.message_types_by_name.values()]


def test_nothing_generated_is_out_of_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    outputs = generate.generate()
    assert len(outputs) > 10
    assert generate.stale_files(outputs) == []


def test_field_numbers_are_never_changed_or_reused():
    """A number that was ever used keeps its field; a removed field is ``reserved`` in the schema."""
    pinned = json.loads(NUMBERS.read_text())
    actual = {m.name: {f.name: f.number for f in m.fields} for m in MESSAGES}
    assert actual == pinned


def test_the_payload_has_the_highest_number_of_its_message():
    frame = transfer_pb2.PushChunksRequest.DESCRIPTOR
    assert max(frame.fields, key=lambda field: field.number).name == "payload"


def test_runtime_floors_are_those_stamped_in_the_generated_code():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(
        re.match(r"([\w-]+)>=([\d.]+)", line).groups()
        for line in project["dependencies"]
        if re.match(r"[\w-]+>=", line)
    )
    folder = ROOT / "cachelink_core/rpc/pb/cachelink/v1"
    protobuf = {
        re.search(r"Protobuf Python Version: ([\d.]+)", path.read_text())[1]
        for path in folder.glob("*_pb2.py")
    }
    grpcio = {
        re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())[1]
        for path in folder.glob("*_pb2_grpc.py")
    }
    assert protobuf == {floors["protobuf"]}
    assert grpcio == {floors["grpcio"]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_schema_follows_its_naming_rules(file):
    assert file.package == "cachelink.v1"
    for service in file.services_by_name.values():
        assert service.name.endswith("Service")
        for method in service.methods:
            assert method.input_type.name.endswith("Request")
            assert method.output_type.name.endswith(("Response", "Event"))


def test_limits_in_the_specification_are_those_of_the_code():
    text = (ROOT / "proto/README.md").read_text("utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([\d,]+) \|", text, re.MULTILINE)
    assert len(rows) >= 15
    for name, value in rows:
        assert getattr(limits, name) == int(value.replace(",", "")), name


def test_the_specification_names_every_field_of_header_and_seal():
    text = (ROOT / "proto/README.md").read_text("utf-8")
    for struct in (Header, Seal, ModelIdentity, LayerGeometry, CodecSpec, SenderTimings):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in text, f"{struct.__name__}.{name}"
