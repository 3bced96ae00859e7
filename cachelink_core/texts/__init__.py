"""The texts that the package ships: two documents for the demonstration, six for judging codecs.

How much a quantized cache loses depends on the text (prose little, tables much), so codecs are
judged on a fixed set of different kinds, and every result is printed. Each text of `EVALUATION`
has at least 1,820 SmolLM2 tokens: a prefix of 1,536 and a continuation of 256 fit.

The demonstration asks `DEMO_QUESTION` after `DEMO`. The answer is a made-up name that occurs in
that document once and nowhere else, so whoever says it has the document's cache. `DEMO_OTHER`
is at least as long in tokens and is silent about it: its cache is the mismatched arm.
"""

from importlib import resources
from typing import Final

from cachelink_core.errors import InvalidRequest

DEMO: Final = "demo"
"""Name of the document that the demonstration hands over."""

DEMO_OTHER: Final = "other"
"""Name of the document whose cache must not answer `DEMO_QUESTION`."""

DEMO_QUESTION: Final = "What was the name of the station's supply boat?"
"""A question that only `DEMO` answers; the prompt is the document, an empty line, the question."""

DEMO_ANSWER: Final = "Marigold Finch"
"""The words that a right answer to `DEMO_QUESTION` contains."""

EVALUATION: Final = ("prose", "essay", "code", "table", "dialogue", "manual")
"""Names of the texts on which codecs are judged."""


def names() -> tuple[str, ...]:
    """Return the name of every shipped text, the two of the demonstration first."""
    return (DEMO, DEMO_OTHER, *EVALUATION)


def read(name: str) -> str:
    """Return one text, without the newline that ends its file.

    Args:
        name: one of `names()`.

    Returns:
        The text; paragraphs are separated by an empty line.

    Raises:
        InvalidRequest: no text of that name is shipped.
    """
    if name not in names():
        raise InvalidRequest(f"text {name!r} is unknown; there are {', '.join(names())}")
    path = resources.files(__name__) / f"{name}.txt"
    return path.read_text(encoding="utf-8").removesuffix("\n")
