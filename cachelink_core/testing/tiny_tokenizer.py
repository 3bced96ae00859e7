"""A byte-level BPE tokenizer made in memory, with a chat template.

Every byte is a token and a few merges exist, so that any text can be written in more than one way:
``[t, h]`` and ``[th]`` both decode to "th", and only the second one comes from tokenizing it.
"""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS: Final = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(len(SPECIAL_TOKENS))

MERGES: Final = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("Ġ", "a"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "t"),
    ("o", "n"),
    ("r", "e"),
    ("Ġ", "s"),
    ("e", "n"),
    ("in", "g"),
    ("o", "u"),
    ("Ġ", "o"),
    ("Ġo", "f"),
)
"""In order of rank; ``Ġ`` is how a byte-level vocabulary writes a space."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; the same one at every call.

    ``<s>`` is the beginning of a plain text, ``</s>`` its end; encoding adds neither.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["".join(pair) for pair in MERGES]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=131_072,
    )
