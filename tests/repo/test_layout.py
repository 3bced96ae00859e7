"""What the repository itself must keep: where packages are, how large files grow, what is banned."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

UNIT_FOLDERS = ("sender", "receiver", "bench", "deploy", "manifests", "proto")
"""Folders that hold packages or files and must never be packages: ``import bench`` is anyone's."""

SOURCE_FOLDERS = ("cachelink_core", "sender", "receiver", "bench", "proto", "tests")
GENERATED = ROOT / "cachelink_core" / "rpc" / "pb"

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "shared", "tools"}

LINE_LIMIT = 400
LONGER = {
    # The plain value of every message.
    "cachelink_core/rpc/types.py": 500,
}
"""Files of ours, tests aside, that may be longer, why, and how long at most."""

BANNED_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
}
BANNED_CALLS = {"eval", "exec", "torch.load", "torch.save", "numpy.load", "np.load", "yaml.load"}
"""Each runs what its input says, or reads and writes a format that does."""

SPARED = {
    # It runs a shipped text that is a program, to show that the program is right.
    "tests/unit/test_texts.py": ["exec()"],
    # It writes a pickled checkpoint, to show that loading refuses it.
    "tests/models/test_loading.py": ["torch.save()"],
}
"""Files that may do one of them, and why."""


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, new ones included, ignored ones not."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return sorted({ROOT / name for name in names if (ROOT / name).is_file()})


SOURCES = [
    path
    for path in tracked(*(f"{folder}/**.py" for folder in SOURCE_FOLDERS))
    if GENERATED not in path.parents
]


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def violations(source: str) -> list[str]:
    """What of a source is banned: imports, and calls by their dotted name."""
    tree = ast.parse(source)
    found = [f"import {name}" for name in imports(tree) if name in BANNED_MODULES]
    found += [f"{name}()" for name, _ in calls(tree) if name in BANNED_CALLS]
    return found + [
        f"{name}(allow_pickle=…)"
        for name, call in calls(tree)
        if any(keyword.arg == "allow_pickle" for keyword in call.keywords)
    ]


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 50
    assert Path(__file__) in SOURCES


@pytest.mark.parametrize("folder", UNIT_FOLDERS)
def test_unit_folders_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_every_package_has_its_init() -> None:
    folders = {path.parent for path in SOURCES if "tests" not in path.relative_to(ROOT).parts}
    without = [f for f in folders if not (f / "__init__.py").exists()]
    assert named(sorted(without)) == ["proto"]


def test_names_say_what_is_inside() -> None:
    vague = [
        path for path in SOURCES if VAGUE_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert named(vague) == []


def test_files_stay_short() -> None:
    ours = [name for name in named(SOURCES) if not name.startswith("tests/")]
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in ours}
    too_long = {n: c for n, c in lengths.items() if c > LONGER.get(n, LINE_LIMIT)}
    assert too_long == {}
    assert [n for n in LONGER if lengths.get(n, 0) <= LINE_LIMIT] == []


def test_nothing_runs_what_its_input_says() -> None:
    found = {name: violations((ROOT / name).read_text()) for name in named(SOURCES)}
    assert {name: what for name, what in found.items() if what} == SPARED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec('1')",
        "import numpy as np\nnp.load('x')",
        "import numpy\nnumpy.frombuffer(b'', allow_pickle=True)",
        "import yaml\nyaml.load('x', yaml.Loader)",
    ],
)
def test_the_ban_bites(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "safetensors.torch.load(b)", "yaml.safe_load(s)"]
)
def test_the_ban_spares_what_is_harmless(source: str) -> None:
    assert violations(source) == []


def test_no_large_or_binary_weights_are_committed() -> None:
    """The models of our own scripts are small; what is larger belongs elsewhere."""
    heavy = [p for p in tracked() if p.stat().st_size > 5_000_000]
    risky = [p for p in tracked() if p.suffix in {".pt", ".pth", ".pkl", ".ckpt", ".npy", ".npz"}]
    assert named(heavy) == []
    assert named(risky) == []
