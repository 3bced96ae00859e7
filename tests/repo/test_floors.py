"""The pins and floors of the dependencies agree with the generated code and with each other."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GENERATED = sorted((ROOT / "cachelink_core" / "rpc" / "pb").rglob("*_pb2*.py"))

PINS = {
    canonicalize_name(line.split("==")[0]): Version(line.split("==")[1])
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
REQUIREMENTS = [
    Requirement(text)
    for text in (
        *PROJECT["dependencies"],
        *(text for extra in PROJECT["optional-dependencies"].values() for text in extra),
    )
    if not text.startswith("cachelink[")
]


def floor(name: str) -> Version:
    (requirement,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name]
    (lowest,) = [s.version for s in requirement.specifier if s.operator == ">="]
    return Version(lowest)


def stamped(pattern: str) -> set[Version]:
    """Versions that the generated files carry: they refuse an older runtime when imported."""
    texts = [path.read_text() for path in GENERATED]
    return {Version(match[1]) for text in texts for match in re.finditer(pattern, text)}


def test_there_is_generated_code() -> None:
    assert len(GENERATED) >= 4


def test_the_protobuf_floor_is_what_the_generated_code_needs() -> None:
    assert stamped(r"# Protobuf Python Version: (\S+)") == {floor("protobuf")}


@pytest.mark.parametrize(
    "name", ["grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"]
)
def test_the_grpc_floors_are_what_the_generated_code_needs(name: str) -> None:
    assert stamped(r"GRPC_GENERATED_VERSION = '(\S+)'") == {floor(name)}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    assert pin in requirement.specifier


def test_pins_are_public_releases() -> None:
    """A local tag such as +cpu exists on one index only."""
    assert [f"{name}=={pin}" for name, pin in PINS.items() if pin.local] == []
