"""The documents name what exists, lead somewhere, and agree with the code."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from cachelink_core import __version__, limits, manifest
from tests.repo import quoted_results
from tests.repo.documents import ROOT, broken_links, commands, inline, missing_paths, read, table

TRACKED = subprocess.run(
    ["git", "ls-files", "--cached"], cwd=ROOT, check=True, capture_output=True, text=True
).stdout.splitlines()
MARKDOWN = sorted(name for name in TRACKED if name.endswith(".md"))
PROJECT = tomllib.loads(read("pyproject.toml"))
OURS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")
ARCHITECTURE = read("ARCHITECTURE.md")


@pytest.mark.parametrize("name", sorted({*MARKDOWN, *OURS}))
def test_links_lead_somewhere(name):
    assert broken_links(name) == []


@pytest.mark.parametrize("name", OURS)
def test_named_paths_exist(name):
    assert missing_paths(name) == []


def test_what_is_missing_is_noticed(tmp_path):
    document = tmp_path / "document.md"
    document.write_text(
        "`tests/no_such.py` `kv/rope.py` `handof/` `handoff/` [a](no.md) [b](#here)\n# Here\n",
        encoding="utf-8",
    )
    assert missing_paths(str(document)) == ["tests/no_such.py", "handof/"]
    assert broken_links(str(document)) == ["no.md"]


@pytest.mark.parametrize("name", OURS)
def test_make_targets_exist(name):
    phony = re.search(r"^\.PHONY: (.+)$", read("Makefile"), flags=re.MULTILINE)[1].split()
    words = [line.split()[1:] for line in commands(read(name), "make") if " " in line]
    targets = {next(w for w in line if "=" not in w) for line in words}
    assert targets <= set(phony)


def test_every_part_of_the_library_is_described():
    first = " ".join(row[0] for row in table(ARCHITECTURE, "1. Parts", "| part"))
    packages = {
        path.split("/")[1]
        for path in TRACKED
        if path.startswith("cachelink_core/") and path.count("/") > 1 and path.endswith(".py")
    }
    named = {span.rstrip("/") for span in inline(first)}
    assert packages - {"texts"} <= named
    assert {"sender", "receiver"} <= named


def test_the_picture_of_imports_is_what_the_linter_enforces():
    (picture,) = re.findall(
        r"^```\n(cachelink_bench\n.*?)^```$", ARCHITECTURE, re.MULTILINE | re.DOTALL
    )
    shown = set(re.findall(r"cachelink_\w+(?:\.\w+)?", picture))
    contracts = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    assert len(contracts) == 2
    for contract in contracts:
        layers = [re.findall(r"[\w.]+", layer) for layer in contract["layers"]]
        assert {name for layer in layers for name in layer} <= shown
        lines = [_line_of(picture, name) for layer in layers for name in layer[:1]]
        assert lines == sorted(lines)
    enforced = {n for c in contracts for layer in c["layers"] for n in re.findall(r"[\w.]+", layer)}
    assert shown == enforced


def _line_of(picture: str, name: str) -> int:
    pattern = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])")
    (line,) = (n for n, text in enumerate(picture.splitlines()) if pattern.search(text))
    return line


def test_quoted_limits_are_those_of_the_code():
    quoted = re.findall(r"`([A-Z_]{6,})` = (\d+)", ARCHITECTURE)
    assert len(quoted) >= 3
    for name, value in quoted:
        found = getattr(limits, name, None)
        if found is None:
            from cachelink_core.engine import executor

            found = getattr(executor, name)
        assert found == int(value), name


def test_quoted_results_are_those_of_the_file():
    codecs = quoted_results.result("codecs-smollm2.json")
    expected = quoted_results.choices_table(codecs)
    assert expected in ARCHITECTURE, expected
    assert f"{quoted_results.noise_floor(codecs)} is the noise floor" in ARCHITECTURE


def test_quoted_codec_rates_are_those_of_the_file():
    said = " ".join(ARCHITECTURE.split())
    for subject, backend, rope in (
        ("smollm2", "compiled", True),
        ("smollm2", "eager", True),
        ("smollm2", "compiled", False),
        ("wide", "compiled", True),
    ):
        (row,) = (
            row
            for row in quoted_results.result("codec-speed.json")["rows"]
            if row["subject"] == subject
            and row["arm"] == {"codec": "int4", "backend": backend, "rope": rope}
        )
        claim = f"{row['encode']['median']:.2f} and {row['decode']['median']:.2f}"
        assert claim in said, (subject, backend, rope, claim)


def test_the_changelog_knows_this_version_and_the_wire():
    text = read("CHANGELOG.md")
    latest = text.split("\n## ")[1]
    assert __version__ in latest
    assert "### Wire" in latest
    wire = f"manifest schema {manifest.SCHEMA_VERSION}, least reader {manifest.MIN_READER_VERSION}"
    assert wire in latest


def test_every_test_folder_is_described():
    described = {
        span for span in inline(read("tests/README.md")) if (ROOT / "tests" / span).is_dir()
    }
    folders = {path.split("/")[1] for path in TRACKED if re.match(r"tests/\w+/", path)}
    assert described == folders
    markers = {
        line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    }
    assert markers <= set(inline(read("tests/README.md")))


def test_tests_that_documents_name_exist():
    named = {span for name in OURS for span in inline(read(name)) if span.startswith("test_")}
    bodies = "".join(read(path) for path in TRACKED if re.match(r"tests/.*\.py", path))
    assert named
    assert [name for name in named if f"def {name}(" not in bodies] == []
