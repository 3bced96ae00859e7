"""Text to ids: frames, special strings, BOS, conversations that go on."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cachelink_core import limits
from cachelink_core.engine.tokens import DOCUMENT_GAP, HFTokens
from cachelink_core.errors import InvalidRequest, PrefixMismatch, UnsupportedModel
from cachelink_core.manifest import QueryFrame
from cachelink_core.testing.tiny_tokenizer import (
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    IM_START_ID,
    tiny_tokenizer,
)

SPECIAL_IDS = {BOS_ID, EOS_ID, IM_START_ID, IM_END_ID}
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "plain turns": "{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION,
    "default system": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}"
        "{% endif %}{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION
    ),
    "trims": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim }}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + GENERATION
    ),
    "emits bos": "{{ bos_token }}{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION,
    "last message apart": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ 'thought ' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + GENERATION
    ),
    "no specials": (
        "{% for m in messages %}{{ '\n' + m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
    ),
}
ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + GENERATION
)
HELLO = {"role": "user", "content": "hello there"}
REPLY = {"role": "assistant", "content": "hi"}
AGAIN = {"role": "user", "content": "and on?"}


def tokens_with(template: str | None) -> HFTokens:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return HFTokens(tokenizer)


@pytest.fixture(scope="module", params=list(TEMPLATES))
def chat(request: pytest.FixtureRequest) -> HFTokens:
    return tokens_with(TEMPLATES[request.param])


def text_of(tokens: HFTokens, ids: tuple[int, ...]) -> str:
    return tokens._special.decode(list(ids), skip_special_tokens=False)


# --- a document ---


def test_a_document_and_its_question_are_what_the_template_writes(chat):
    prefix = chat.document("The cat sat on the mat.")
    query = chat.question("Where?", prefix.frame)
    whole = text_of(chat, prefix.ids + query)
    message = {"role": "user", "content": f"The cat sat on the mat.{DOCUMENT_GAP}Where?"}
    assert whole == chat._tokenizer.apply_chat_template(
        [message], tokenize=False, add_generation_prompt=True
    )


def test_a_document_is_tokenized_alone_so_that_any_question_fits(chat):
    prefix = chat.document("The cat sat")
    document = chat.plain("The cat sat")
    assert prefix.ids[-len(document) :] == document


def test_without_a_template_a_document_is_bos_and_text():
    tokens = tokens_with(None)
    prefix = tokens.document("the cat")
    assert prefix.ids == (BOS_ID, *tokens.plain("the cat"))
    assert prefix.frame == QueryFrame()


def test_a_plain_document_of_a_chat_model_is_bos_and_text(chat):
    prefix = chat.document("the cat", chat=False)
    assert prefix.ids == (BOS_ID, *chat.plain("the cat"))
    assert prefix.frame == QueryFrame()


def test_no_bos_where_the_model_has_none():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    tokens = HFTokens(tokenizer)
    assert tokens.document("the cat", chat=False).ids == tokens.plain("the cat")


def test_bos_is_there_once_where_the_template_emits_it():
    tokens = tokens_with(TEMPLATES["emits bos"])
    for prefix in (tokens.document("text"), tokens.conversation([HELLO, REPLY])):
        assert prefix.ids[0] == BOS_ID
        assert prefix.ids.count(BOS_ID) == 1
        assert BOS_ID not in tokens.question("Why?", prefix.frame)


def test_bos_is_not_added_to_a_template_without_it():
    tokens = tokens_with(TEMPLATES["plain turns"])
    assert BOS_ID not in tokens.document("text").ids
    assert BOS_ID not in tokens.conversation([HELLO]).ids


def test_bos_is_not_doubled_by_a_tokenizer_that_adds_it_itself():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    assert tokenizer("a").input_ids[0] == BOS_ID
    tokens = HFTokens(tokenizer)
    assert tokens.document("a", chat=False).ids.count(BOS_ID) == 1
    assert BOS_ID not in tokens.plain("a")


def test_an_empty_document_is_allowed(chat):
    assert text_of(chat, chat.document("").ids).endswith(("user\n", "user: "))
    assert tokens_with(None).document("").ids == (BOS_ID,)


def test_chat_without_a_template_is_refused():
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokens_with(None).document("text", chat=True)


def test_white_space_around_a_document_stays_except_where_the_template_trims_it():
    kept = tokens_with(TEMPLATES["plain turns"]).document("  text \n").ids
    trimmed = tokens_with(TEMPLATES["trims"]).document("  text \n").ids
    assert text_of(tokens_with(None), kept).endswith("user\n  text \n")
    assert text_of(tokens_with(None), trimmed).endswith("user\ntext \n")


# --- special strings are text ---


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>user\nb", "<s></s>", "<|im_end|>\n"])
def test_special_strings_in_a_text_are_plain(chat, text):
    own = [i for i in chat.document("x").ids if i in SPECIAL_IDS]
    assert [i for i in chat.document(text).ids if i in SPECIAL_IDS] == own
    assert not SPECIAL_IDS & set(chat.plain(text))
    assert not SPECIAL_IDS & set(chat.question(text, QueryFrame()))
    said = chat.conversation([{"role": "user", "content": text}]).ids
    clean = chat.conversation([{"role": "user", "content": "x"}]).ids
    assert [i for i in said if i in SPECIAL_IDS] == [i for i in clean if i in SPECIAL_IDS]
    assert chat.decode(chat.plain(text)) == text


def test_a_frame_is_tokenized_with_its_special_tokens():
    tokens = tokens_with(TEMPLATES["plain turns"])
    ids = tokens.question("a", QueryFrame("<|im_start|>", "<|im_end|>"))
    assert ids == (IM_START_ID, *tokens.plain("a"), IM_END_ID)


def test_threads_do_not_switch_special_strings_for_each_other():
    tokens = tokens_with(TEMPLATES["plain turns"])
    text = "<|im_end|> the " * 50
    with ThreadPoolExecutor(4) as pool:
        plain = pool.map(lambda _: tokens.plain(text), range(100))
        framed = pool.map(lambda _: tokens.question("", QueryFrame(text, "")), range(100))
        assert not SPECIAL_IDS & {i for ids in plain for i in ids}
        assert all(ids.count(IM_END_ID) == 50 for ids in framed)


def test_marks_do_not_collide_with_private_use_characters(chat):
    text = "\ue000" + "0\ue000 \ue001"
    assert chat.decode(chat.document(text).ids).endswith(text)


# --- conversations ---


@pytest.mark.parametrize("messages", [[HELLO], [HELLO, REPLY], [HELLO, REPLY, AGAIN, REPLY]])
def test_a_conversation_goes_on_in_its_frame(chat, messages):
    prefix = chat.conversation(messages)
    query = chat.question("and on?", prefix.frame)
    assert text_of(chat, prefix.ids + query) == chat._tokenizer.apply_chat_template(
        [*messages, AGAIN], tokenize=False, add_generation_prompt=True
    )
    assert prefix.messages == tuple(messages)


@pytest.mark.parametrize("messages", [[HELLO], [HELLO, REPLY], [HELLO, REPLY, AGAIN, REPLY]])
def test_messages_continue_a_cached_conversation(chat, messages):
    prefix = chat.conversation(messages)
    assert chat.continuation([*messages, AGAIN], prefix.ids) == chat.question(
        "and on?", prefix.frame
    )


def test_the_same_messages_give_the_prompt_of_the_answer():
    tokens = tokens_with(TEMPLATES["plain turns"])
    prefix = tokens.conversation([HELLO])
    ids = tokens.continuation([HELLO], prefix.ids)
    assert text_of(tokens, ids) == "<|im_start|>assistant\n"


def test_messages_continue_a_cached_document(chat):
    prefix = chat.document("The cat sat.")
    message = {"role": "user", "content": f"The cat sat.{DOCUMENT_GAP}Where?"}
    rest = chat.continuation([message], prefix.ids)
    whole = text_of(chat, prefix.ids + rest)
    assert (
        whole.rstrip() == text_of(chat, prefix.ids + chat.question("Where?", prefix.frame)).rstrip()
    )


def test_a_content_is_cut_where_the_cached_ids_end():
    tokens = tokens_with(TEMPLATES["plain turns"])
    prefix = tokens.document("s t")  # "s the" would be tokenized with one token for " the"
    message = {"role": "user", "content": "s then"}
    assert tokens.plain("s then")[: len(tokens.plain("s t"))] != tokens.plain("s t")
    rest = tokens.continuation([message], prefix.ids)
    assert text_of(tokens, prefix.ids + rest).startswith("<|im_start|>user\ns then<|im_end|>")


def test_other_messages_are_refused_with_the_first_differing_position(chat):
    prefix = chat.conversation([HELLO, REPLY])
    other = [{"role": "user", "content": "hello where"}, REPLY, AGAIN]
    with pytest.raises(PrefixMismatch, match=r"position \d+: cached \d+ \('.*'\), rendered \d+ \("):
        chat.continuation(other, prefix.ids)
    position = next(
        at
        for at, (a, b) in enumerate(zip(prefix.ids, chat.conversation(other).ids, strict=False))
        if a != b
    )
    with pytest.raises(PrefixMismatch, match=f"position {position}:"):
        chat.continuation(other, prefix.ids)


def test_fewer_messages_than_cached_are_refused():
    tokens = tokens_with(TEMPLATES["plain turns"])
    prefix = tokens.conversation([HELLO, REPLY, AGAIN])
    with pytest.raises(PrefixMismatch, match="cached"):
        tokens.continuation([HELLO], prefix.ids)


def test_a_prefix_that_is_tokenized_differently_goes_by_its_ids():
    tokens = tokens_with(TEMPLATES["plain turns"])
    canonical = tokens.conversation([{"role": "user", "content": "the"}]).ids
    split = tokens.plain("t") + tokens.plain("h") + tokens.plain("e")
    at = canonical.index(tokens.plain("the")[0])
    other = (*canonical[:at], *split, *canonical[at + 1 :])
    assert tokens.decode(other) == tokens.decode(canonical)
    with pytest.raises(PrefixMismatch, match=f"position {at}: cached {split[0]} "):
        tokens.continuation([{"role": "user", "content": "the"}], other)


def test_where_roles_alternate_a_conversation_may_end_with_the_user():
    tokens = tokens_with(ALTERNATING)
    prefix = tokens.conversation([HELLO])
    assert prefix.frame == QueryFrame()
    assert text_of(tokens, tokens.continuation([HELLO], prefix.ids)) == "<|im_start|>assistant\n"
    assert tokens.conversation([HELLO, REPLY]).frame.before == "<|im_start|>user\n"


def test_what_the_template_refuses_is_an_invalid_request():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokens_with(ALTERNATING).conversation([HELLO, HELLO])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages is empty"),
        ([{"role": "user"}], r"messages\[0\].content is None"),
        ([HELLO, {"content": "x"}], r"messages\[1\].role is None"),
    ],
)
def test_malformed_messages_are_refused_by_field(messages, field):
    with pytest.raises(InvalidRequest, match=field):
        tokens_with(TEMPLATES["plain turns"]).conversation(messages)


def test_a_template_that_drops_a_message_is_refused():
    template = "{% for m in messages if m['role'] == 'user' %}" + TURN + "{% endfor %}" + GENERATION
    with pytest.raises(InvalidRequest, match=r"messages\[1\].*'assistant'"):
        tokens_with(template).conversation([HELLO, REPLY])


def test_a_template_that_looks_at_contents_is_refused():
    template = (
        "{% for m in messages %}{% if 'secret' in m['content'] %}{{ 'hush' }}{% endif %}"
        "{{ m['content'] }}{% if 'secret' in m['content'] %}{{ 'hush' }}{% endif %}{{ '|' }}"
        "{% endfor %}{% if 'secret' in messages[0]['content'] %}{{ 'end' }}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match="changes its own text"):
        tokens_with(template).document("a secret")


def test_a_template_may_cut_a_part_of_a_content():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['content'].split('|')[-1] }}{% endfor %}"
    )
    tokens = tokens_with(template)
    prefix = tokens.conversation([{"role": "assistant", "content": "thought|answer"}])
    assert tokens.decode(prefix.ids) == "answer"


# --- the next turn ---


def test_the_next_frame_does_not_repeat_the_end_of_the_answer():
    tokens = tokens_with(TEMPLATES["plain turns"])
    frame = tokens.document("x").frame
    after = "<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.next_frame(frame, IM_END_ID) == QueryFrame("\n<|im_start|>user\n", after)
    cut_off = QueryFrame("<|im_end|>\n<|im_start|>user\n", after)
    assert tokens.next_frame(frame, tokens.plain("x")[0]) == cut_off
    assert tokens.next_frame(frame, EOS_ID) == cut_off


def test_turns_in_frames_are_the_rendered_conversation():
    tokens = tokens_with(TEMPLATES["default system"])
    prefix = tokens.conversation([HELLO])
    held = prefix.ids + tokens.continuation([HELLO], prefix.ids)
    held += (*tokens.plain("hi"), IM_END_ID)  # what the model answered
    frame = tokens.next_frame(prefix.frame, IM_END_ID)
    held += tokens.question("and on?", frame)
    assert text_of(tokens, held) == tokens._tokenizer.apply_chat_template(
        [HELLO, REPLY, AGAIN], tokenize=False, add_generation_prompt=True
    )
    assert held == tokens.conversation([HELLO, REPLY]).ids + tokens.question(
        "and on?", tokens.conversation([HELLO, REPLY]).frame
    )


def test_a_plain_prompt_stays_plain():
    assert tokens_with(None).next_frame(QueryFrame("a", "b"), EOS_ID) == QueryFrame()
    chat_model = tokens_with(TEMPLATES["plain turns"])
    assert chat_model.next_frame(QueryFrame(), IM_END_ID) == QueryFrame()


# --- tokenizers that write a space before everything ---


def metaspace_tokens() -> HFTokens:
    alphabet = [*"abcdefghijklmnopqrstuvwxyz?.:<|>_", "▁", "\n"]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "▁a"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return HFTokens(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            chat_template="<s>{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}"
            "{% endfor %}",
        )
    )


def test_a_text_that_continues_gets_no_space_in_front():
    tokens = metaspace_tokens()
    assert tokens.decode(tokens.document("a b", chat=False).ids) == "a b"
    first = tokens.document("a b", chat=False).ids[1:]
    assert text_of(tokens, first[:1]) == "a"
    assert tokens._special.id_to_token(first[0]) == "▁a"
    assert tokens._special.id_to_token(tokens.plain("a b")[0]) == "a"


def test_pieces_join_without_extra_spaces():
    tokens = metaspace_tokens()
    prefix = tokens.document("abc")
    query = tokens.question("b?", prefix.frame)
    text = tokens.decode(prefix.ids + query)
    assert text == "user: abc\n\nb?\n"


# --- limits and bad text ---


def test_too_long_a_text_is_refused_before_it_is_tokenized():
    text = "a" * (limits.MAX_TEXT_CHARS + 1)
    for call in (tokens_with(None).plain, tokens_with(None).document):
        with pytest.raises(InvalidRequest, match=f"{limits.MAX_TEXT_CHARS + 1} characters"):
            call(text)


def test_too_many_tokens_are_refused():
    with pytest.raises(InvalidRequest, match=f"limit is {limits.MAX_PREFIX_TOKENS}"):
        tokens_with(None).document("x" * limits.MAX_PREFIX_TOKENS)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(InvalidRequest, match="not Unicode"):
        tokens_with(None).document("\ud800")


def test_a_tokenizer_without_a_pipeline_is_refused():
    class Slow:
        backend_tokenizer = None
        bos_token_id = None
        chat_template = None

    with pytest.raises(UnsupportedModel, match="Slow is not a fast one"):
        HFTokens(Slow())


@pytest.mark.parametrize("text", ["", "the cat", "naïve ☃ \U0001f600", "\n\n\t  x", "<|im_end|>"])
def test_plain_text_survives_a_round_trip(text):
    tokens = tokens_with(None)
    assert tokens.decode(tokens.plain(text)) == text
