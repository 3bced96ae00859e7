"""Readable English of any length, the same for the same seed: made-up facts of made-up places.

Every sentence states one fact. The first one of a document names a watchword that occurs nowhere
else; the question asks for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

_STARTS: Final = ("Al", "Bren", "Cor", "Dun", "El", "Far", "Gal", "Hol", "Ister", "Kel", "Lor",
                  "Mar", "Nor", "Os", "Pel", "Quen", "Ros", "Sel", "Tor", "Ul", "Ver", "Wes")  # fmt: skip
_ENDS: Final = ("bridge", "combe", "dale", "ford", "garth", "ham", "holt", "leigh", "mere", "mouth",
                "ness", "port", "stead", "stow", "thorpe", "wick")  # fmt: skip
_PEOPLE: Final = ("Ada", "Bertil", "Clara", "Doru", "Edda", "Felix", "Greta", "Hamid", "Ines",
                  "Jonas", "Katya", "Leon", "Mira", "Niels", "Oona", "Piotr", "Rosa", "Sven",
                  "Tamar", "Ugo", "Vera", "Wim", "Yara", "Zeno")  # fmt: skip
_WORKS: Final = ("baker", "bell founder", "cartographer", "clockmaker", "ferryman", "gardener",
                 "glassblower", "harbour pilot", "librarian", "mason", "miller",
                 "printer", "saddler", "schoolteacher", "shipwright", "surveyor", "weaver")  # fmt: skip
_THINGS: Final = ("barrels of salt", "bolts of linen", "boxes of type", "brass lamps",
                  "bundles of willow", "clay jars", "coils of rope", "copper kettles",
                  "crates of apples", "fishing nets", "iron hinges", "oak planks", "paper charts",
                  "roof slates", "sacks of barley", "silver spoons", "wool blankets")  # fmt: skip
_COLOURS: Final = ("black", "blue", "brown", "cream", "crimson", "green", "grey",
                   "purple", "white", "yellow")  # fmt: skip
_SEASONS: Final = ("in early spring", "after the first frost", "at midsummer", "in late autumn",
                   "before the winter storms", "when the river is low", "after the harvest")  # fmt: skip
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_TEMPLATES: Final = (
    "The {work} of {place}, {person}, keeps {count} {things} in a shed with a {colour} door.",
    "Every {day} a cart brings {things} from {place} to {other}, a journey of {count} miles.",
    "{person} came to {place} {count} years ago and has worked there as a {work} ever since.",
    "The road between {place} and {other} is mended {season}, mostly by volunteers.",
    "In {place} the market opens on {day}, and the {work} sells {things} until noon.",
    "The tower at {place} has {count} steps and a {colour} flag that {person} raises on {day}.",
    "{person} once counted {count} {things} in the old store at {place} and wrote it in a book.",
    "A {work} from {other} taught the children of {place} to paint {things} {colour}.",
    "The mill at {place} grinds grain {season}, and {person} carries the flour to {other}.",
    "Between {place} and {other} lies a {colour} meadow where {count} sheep graze {season}.",
)

_SYLLABLES: Final = ("bar", "cel", "dor", "fen", "gil", "hax", "jun", "kor", "lim", "mov", "nep",
                     "pol", "rud", "sib", "tav", "vek", "wol", "yar", "zin")  # fmt: skip


class Corpus:
    """The text of one seed.

    Attributes:
        question: that the first sentence answers.
        watchword: the answer.
    """

    def __init__(self, seed: str) -> None:
        """Draws the place and the watchword.

        Args:
            seed: any text.
        """
        self._random = random.Random(seed)
        self._place = self._name()
        self.watchword = "".join(self._random.choices(_SYLLABLES, k=3)).capitalize()
        self.question = f"What is the watchword of the archive at {self._place}?"

    def sentences(self) -> Iterator[str]:
        """Without end; the first one answers the question."""
        yield f"The watchword of the archive at {self._place} is {self.watchword}."
        while True:
            yield self._sentence()

    def _sentence(self) -> str:
        pick = self._random.choice
        return pick(_TEMPLATES).format(
            place=self._name(),
            other=self._name(),
            person=pick(_PEOPLE),
            work=pick(_WORKS),
            things=pick(_THINGS),
            colour=pick(_COLOURS),
            season=pick(_SEASONS),
            day=pick(_DAYS),
            count=self._random.randint(3, 98),
        )

    def _name(self) -> str:
        return self._random.choice(_STARTS) + self._random.choice(_ENDS)
