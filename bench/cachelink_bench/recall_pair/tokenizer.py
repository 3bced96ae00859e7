"""The word-level tokenizer of both models of the recall pair."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cachelink_bench.recall_pair.words import BOS_ID, SPECIAL_TOKENS, TOKEN_IDS

MAX_TOKENS = 1_024
"""``model_max_length`` of the tokenizer and ``max_position_embeddings`` of the models."""


def recall_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; the same one at every call.

    One word or mark is one token, a word outside the vocabulary is ``<unk>``. Encoding puts
    ``<bos>`` in front unless ``add_special_tokens=False``. Decoding writes spaces between words and
    none before a mark: "Ada sings. Bruno paints."
    """
    backend = Tokenizer(models.WordLevel(vocab=dict(TOKEN_IDS), unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    # Nothing in the vocabulary starts with the prefix: of this decoder only its spacing is used.
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
    )
