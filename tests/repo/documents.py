"""Reads Markdown as far as the tests of the documents need it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(text: str, language: str | None = None) -> list[str]:
    """The bodies of fenced blocks, or of those of one language."""
    found = re.findall(r"^```([a-z]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [body for name, body in found if language is None or name == language]


def inline(text: str) -> list[str]:
    """Code spans outside fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(text: str, name: str) -> list[str]:
    """Every command line of a program: lines of fenced blocks, and code spans."""
    lines = [line for body in fences(text) for line in body.splitlines()]
    shown = [*lines, *inline(text)]
    return [line for line in shown if line == name or line.startswith(f"{name} ")]


def links(text: str) -> list[str]:
    """Targets of links that are not on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if "://" not in target]


def anchors(text: str) -> set[str]:
    """What a link to a heading of this text may end with, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken_links(name: str) -> list[str]:
    """Links of one document that lead nowhere."""
    base = (ROOT / name).parent
    broken = []
    for target in links(read(name)):
        path, _, anchor = target.partition("#")
        place = base / path if path else ROOT / name
        if not place.exists() or (
            anchor and anchor not in anchors(place.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    return broken


def missing_paths(name: str) -> list[str]:
    """Code spans of one document that look like paths of the repository and are none.

    A path is a folder (``handoff/``), begins with a top folder, or ends like one of our files. It may
    be given from the root, the document's folder, the library, or a daemon's or benchmark's folder.
    """
    tops = {path.name for path in ROOT.iterdir()}
    bases = [ROOT, (ROOT / name).parent]
    bases += [ROOT / place for place in ("cachelink_core", "sender", "receiver", "bench")]
    missing = []
    for span in inline(read(name)):
        if not re.fullmatch(r"[a-z][\w\-]*(/[\w.\-]+)*(\.\w+)?/?", span):
            continue
        folder, file = span.endswith("/"), re.search(r"\.(py|md|yaml|proto|toml)$", span)
        inside = "/" in span and span.split("/")[0] in tops
        looks = folder or file or inside
        if looks and not any((base / span).exists() for base in bases):
            missing.append(span)
    return missing


def table(text: str, heading: str, header: str) -> list[list[str]]:
    """Rows of the table under a heading whose first line begins with ``header``."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    rows = section[section.index(header) :].split("\n\n")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
