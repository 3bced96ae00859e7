"""The words of the recall task, and their token ids.

Subjects, actions and plain words do not overlap: a plain sentence never states a fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
PUNCTUATION: Final = (".", "?")

SUBJECTS: Final = _words(
    """
    Ada Amir Anton Beata Bella Bruno Carlos Clara Cyril David Diana Dora Elena Emil Erik Felix
    Fiona Flora Georg Greta Gustav Hanna Heidi Hugo Ines Irene Ivan Jakob Jonas Julia Karla Kira
    Kofi Lena Leo Lukas Mara Marco Milan Nadia Nils Nora Olga Oscar Pablo Petra Quinn Ravi Rosa
    Simon Sofia Tessa Tomas Ulrich Uma Vera Victor Walter Wanda Xenia Yara Yusuf Zeno Zoe
    """
)
"""People: the first word of a fact."""

ACTIONS: Final = _words(
    """
    acts bakes boxes builds camps carves cleans climbs cooks counts dances debates dives draws
    drives farms fences films fishes flies gardens hikes hums hunts juggles jumps knits laughs
    listens marches meditates paints plays prays reads rests rides rows runs sails sews shops sings
    skates skis sleeps smiles studies surfs swims teaches trades travels votes waits walks waves
    weaves whistles whittles wins works writes yawns
    """
)
"""What a person does: the second word of a fact, and the answer to a query."""

ADJECTIVES: Final = ("bright", "cold", "grey", "old", "quiet", "small", "warm", "wide")
SCENES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "bell": ("rings", "hangs"),
        "cloud": ("drifts", "darkens"),
        "field": ("dries", "freezes"),
        "fire": ("glows", "crackles"),
        "lamp": ("glows", "flickers"),
        "moon": ("rises", "sets"),
        "river": ("bends", "freezes"),
        "road": ("bends", "ends"),
        "sea": ("roars", "calms"),
        "sun": ("rises", "sets"),
        "tree": ("sways", "blooms"),
        "wind": ("roars", "turns"),
    }
)
"""Noun to the verbs that may follow it in a plain sentence."""
ADVERBS: Final = ("again", "early", "here", "late", "slowly", "softly", "soon", "tonight")
ARTICLE: Final = "the"

PLAIN_WORDS: Final = (
    ARTICLE,
    *ADJECTIVES,
    *SCENES,
    *sorted({verb for verbs in SCENES.values() for verb in verbs}),
    *ADVERBS,
)

VOCABULARY: Final = (*SPECIAL_TOKENS, *PUNCTUATION, *SUBJECTS, *ACTIONS, *PLAIN_WORDS)
"""Every token; its index is its id."""

TOKEN_IDS: Final[Mapping[str, int]] = MappingProxyType(
    {token: index for index, token in enumerate(VOCABULARY)}
)
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(len(SPECIAL_TOKENS))
STOP_ID: Final = TOKEN_IDS["."]
ASK_ID: Final = TOKEN_IDS["?"]
