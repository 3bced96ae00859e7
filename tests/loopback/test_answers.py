"""Answer through real daemons: contexts, queries, policies, and what it may never disturb."""

from __future__ import annotations

import threading
import time

import pytest

from cachelink_core import errors
from cachelink_core.rpc.client import (
    Conversation,
    Document,
    HeldCache,
    HeldHandoff,
    Message,
    Question,
    Sampling,
    TokenIds,
    VerbatimText,
)
from tests.loopback.nodes import BLOCK_TOKENS, pair_of
from tests.loopback.offers import IDS, Offer, slowly

GREEDY = Sampling(max_new_tokens=12, ignore_eos=True)
TEXT = "The lamp of the tower was lit at dusk. " * 6


def ids_of(answer) -> list[int]:
    return [token for delta in answer for token in delta.token_ids]


def handed(pair, prefix=None, codec="native"):
    return pair.ask_sender.handoff(prefix or Document(TEXT), "local", codec=codec)


@pytest.mark.parametrize("chat", [True, False])
def test_every_kind_of_context_gives_the_same_answer(pair, chat):
    receipt = handed(pair, Document(TEXT, chat))
    question = Question("When was it lit?")
    answers = [
        pair.ask_receiver.answer(HeldCache(receipt.cache_id), question, sampling=GREEDY),
        pair.ask_receiver.answer(HeldHandoff(receipt.handoff_id), question, sampling=GREEDY),
        pair.ask_sender.answer(HeldCache(receipt.sender_cache_id), question, sampling=GREEDY),
        pair.ask_sender.answer(Document(TEXT, chat), question, sampling=GREEDY),
    ]
    found = [ids_of(answer) for answer in answers]
    assert found[0]
    assert found == [found[0]] * 4
    assert [answer.final.path for answer in answers] == ["exact"] * 4
    held = answers[0].final
    assert held.cached_tokens == receipt.tokens
    assert held.model_tokens == held.fresh_tokens + held.generated_tokens - 1


def test_re_reading_is_the_same_schedule_only_in_equal_blocks(engines):
    """The receiver re-reads in its own blocks; with the sender's block size it is bit for bit."""
    with pair_of(
        engines("llama"), engines("llama", side="receiver"), sender_config={"block_tokens": 256}
    ) as pair:
        receipt = handed(pair)
        question = Question("When?")
        cached = ids_of(
            pair.ask_receiver.answer(HeldCache(receipt.cache_id), question, sampling=GREEDY)
        )
        again = pair.ask_receiver.answer(Document(TEXT), question, sampling=GREEDY)
        assert ids_of(again) == cached
        assert again.final.path == "recompute"
        assert again.final.cached_tokens == 0
        assert again.final.model_tokens == again.final.fresh_tokens + 11


def test_messages_continue_a_conversation_or_are_refused_with_the_position(pair):
    first = (Message("system", "Be brief."), Message("user", TEXT))
    receipt = handed(pair, Conversation(first))
    context = HeldCache(receipt.cache_id)
    more = (*first, Message("user", "And then?"))
    answer = pair.ask_receiver.answer(context, Conversation(more), sampling=GREEDY)
    assert len(ids_of(answer)) == 12
    other = (Message("system", "Be long."), *more[1:])
    with pytest.raises(errors.PrefixMismatch, match="position"):
        pair.ask_receiver.answer(context, Conversation(other), sampling=GREEDY).text()


def test_a_document_goes_by_ids_even_if_its_text_tokenizes_otherwise(pair):
    tokens = pair.sender_engine.tokens
    odd = next(
        ids
        for ids in ((a, b) for a in range(10, 250) for b in range(10, 250))
        if tokens.plain(tokens.decode(ids)) not in (ids, ())
    )
    prefix = IDS + odd
    receipt = handed(pair, TokenIds(prefix))
    stored = pair.receiver_node.parts.store.find("default", receipt.cache_id)
    assert stored.ids == prefix


def test_two_questions_at_once_both_get_right_answers(pair):
    receipt = handed(pair)
    questions = [Question("When was it lit?"), Question("What is a lamp?")] * 2

    def ask(question):
        return ids_of(
            pair.ask_receiver.answer(HeldCache(receipt.cache_id), question, sampling=GREEDY)
        )

    alone = [ask(question) for question in questions]
    together: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i, q=q: together.__setitem__(i, ask(q)))
        for i, q in enumerate(questions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [together[i] for i in range(4)] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("overlap", ["wait", "copy"])
def test_two_questions_at_once_by_another_policy(engines, overlap):
    config = {"overlap": overlap}
    sending, receiving = engines("llama"), engines("llama", side="receiver")
    with pair_of(sending, receiving, receiver_config=config) as pair:
        test_two_questions_at_once_both_get_right_answers(pair)


@pytest.mark.parametrize("overlap", ["share", "copy"])
def test_without_room_in_the_budget_questions_wait_and_are_right(engines, overlap):
    sending, receiving = engines("llama"), engines("llama", side="receiver")
    with pair_of(sending, receiving) as pair:
        used = handed(pair) and pair.ask_receiver.caches().used_bytes
    config = {"overlap": overlap, "store": {"budget": f"{used + 1000}B"}}
    with pair_of(sending, receiving, receiver_config=config) as pair:
        test_two_questions_at_once_both_get_right_answers(pair)
        assert pair.ask_receiver.caches().used_bytes == used


def test_an_answer_waits_for_a_handoff_that_is_arriving(pair):
    offer = Offer(pair)
    offer.reserve()
    context = HeldHandoff(offer.header.handoff_id)
    with pytest.raises(errors.StillInTransfer, match="in_transfer"):
        pair.ask_receiver.answer(context, TokenIds((5, 6)), sampling=GREEDY, wait_s=0.1).text()
    sender = threading.Thread(target=lambda: offer.push(slowly(offer.messages(), 0.1)))
    sender.start()
    answer = pair.ask_receiver.answer(context, TokenIds((5, 6)), sampling=GREEDY, wait_s=20.0)
    assert len(ids_of(answer)) == 12
    assert answer.final.phases["wait"] > 0.1
    sender.join(20)


def test_least_trust(pair):
    receipt = handed(pair, codec="int8")
    context = HeldCache(receipt.cache_id)
    question = Question("When?")
    with pytest.raises(errors.InsufficientTrust, match=r"lossy.*exact"):
        pair.ask_receiver.answer(context, question, least_trust="exact").text()
    answer = pair.ask_receiver.answer(
        context, question, least_trust="exact", on_failure="recompute", sampling=GREEDY
    )
    answer.text()
    assert answer.final.path == "recompute"
    assert "insufficient_trust" in answer.final.path_reason
    lossy = pair.ask_receiver.answer(context, question, least_trust="lossy", sampling=GREEDY)
    lossy.text()
    assert lossy.final.path == "lossy"


def test_a_lossy_cache_never_passes_for_an_exact_one(pair):
    lossy, exact = handed(pair, codec="int4"), handed(pair, codec="native")
    assert lossy.cache_id != exact.cache_id
    assert not exact.already_installed
    assert handed(pair, codec="native+zstd").already_installed


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (Question(""), errors.EmptyQuery),
        (VerbatimText(""), errors.EmptyQuery),
        (TokenIds(()), errors.EmptyQuery),
        (TokenIds((2**31,)), errors.InvalidRequest),
    ],
)
def test_a_wrong_query_is_refused_and_disturbs_nothing(pair, query, error):
    receipt = handed(pair)
    context = HeldCache(receipt.cache_id)
    before = ids_of(pair.ask_receiver.answer(context, Question("When?"), sampling=GREEDY))
    with pytest.raises(error):
        pair.ask_receiver.answer(context, query, sampling=GREEDY).text()
    after = ids_of(pair.ask_receiver.answer(context, Question("When?"), sampling=GREEDY))
    assert after == before


def test_a_query_too_long_for_the_model(pair):
    receipt = handed(pair)
    window = pair.receiver_engine.identity.max_positions
    with pytest.raises(errors.QueryTooLong, match=str(window)):
        pair.ask_receiver.answer(
            HeldCache(receipt.cache_id), TokenIds((5,) * window), sampling=GREEDY
        ).text()


def test_an_answer_beyond_the_headroom_grows_or_is_refused(engines):
    sending, receiving = engines("llama"), engines("llama", side="receiver")
    long = Sampling(max_new_tokens=200, ignore_eos=True)
    with pair_of(sending, receiving, receiver_config={"headroom_tokens": 8}) as pair:
        receipt = handed(pair)
        answer = pair.ask_receiver.answer(HeldCache(receipt.cache_id), Question("?"), sampling=long)
        assert len(ids_of(answer)) == 200
    budget = {"headroom_tokens": 8, "store": {"budget": "330KB"}}
    with pair_of(sending, receiving, receiver_config=budget) as pair:
        receipt = handed(pair)
        before = pair.ask_receiver.caches()
        with pytest.raises(errors.HeadroomExceeded, match="room"):
            pair.ask_receiver.answer(
                HeldCache(receipt.cache_id), Question("?"), sampling=long
            ).text()
        assert pair.ask_receiver.caches().used_bytes == before.used_bytes


def test_unknown_cache(pair):
    with pytest.raises(errors.UnknownCache, match="nothing"):
        pair.ask_receiver.answer(HeldCache("nothing"), Question("?")).text()
    with pytest.raises(errors.UnknownCache, match="nothing"):
        pair.ask_receiver.evict("nothing")


def test_an_evicted_cache_is_read_again_by_id(pair):
    receipt = handed(pair)
    context, question = HeldCache(receipt.cache_id), Question("When?")
    pair.ask_receiver.evict(receipt.cache_id)
    with pytest.raises(errors.UnknownCache):
        pair.ask_receiver.answer(context, question).text()
    answer = pair.ask_receiver.answer(context, question, on_failure="recompute", sampling=GREEDY)
    assert len(ids_of(answer)) == 12
    assert answer.final.path == "recompute"


def test_cancelling_stops_the_model_within_a_token(pair):
    receipt = handed(pair)
    engine = pair.receiver_engine
    answer = pair.ask_receiver.answer(
        HeldCache(receipt.cache_id),
        Question("When?"),
        sampling=Sampling(max_new_tokens=60, ignore_eos=True),
    )
    next(answer)
    answer.cancel()
    deadline_s = time.monotonic() + 5.0
    while pair.receiver_node.parts.answers.in_use and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert pair.receiver_node.parts.answers.in_use == 0
    settled = engine.model_tokens
    time.sleep(0.1)
    assert engine.model_tokens == settled
    again = pair.ask_receiver.answer(
        HeldCache(receipt.cache_id), Question("When?"), sampling=GREEDY
    )
    assert len(ids_of(again)) == 12


def test_stop_strings_seeds_and_logprobs(pair):
    receipt = handed(pair)
    context, question = HeldCache(receipt.cache_id), Question("When?")
    full = pair.ask_receiver.answer(context, question, sampling=GREEDY).text()
    stop = full[3:5]
    stopped = pair.ask_receiver.answer(
        context, question, sampling=Sampling(max_new_tokens=12, ignore_eos=True, stop=(stop,))
    )
    assert stopped.text() == full[: full.index(stop)]
    assert stopped.final.finish_reason == "stop"

    def sampled(seed):
        sampling = Sampling(max_new_tokens=12, ignore_eos=True, temperature=1.5, seed=seed)
        return ids_of(pair.ask_receiver.answer(context, question, sampling=sampling))

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    scored = pair.ask_receiver.answer(
        context, question, sampling=Sampling(max_new_tokens=3, ignore_eos=True, logprobs=2)
    )
    entries = [entry for delta in scored for entry in delta.logprobs]
    assert len(entries) == 3
    assert all(entry.chosen <= 0 and len(entry.alternatives) == 2 for entry in entries)


def test_a_conversation_changes_node_in_the_middle(engines):
    """Two turns at the sender, then the third at the receiver: the tokens of the unbroken run."""
    with pair_of(engines("llama"), engines("llama", side="receiver")) as pair:
        asked = [Question(text) for text in ("One?", "Two?", "Three?")]
        first = pair.ask_sender.answer(Document(TEXT), asked[0], sampling=GREEDY, keep=True)
        first.text()
        second = pair.ask_sender.answer(
            HeldCache(first.final.kept_cache_id), asked[1], sampling=GREEDY, keep=True
        )
        second.text()
        kept = HeldCache(second.final.kept_cache_id)
        unbroken = ids_of(pair.ask_sender.answer(kept, asked[2], sampling=GREEDY))
        receipt = pair.ask_sender.handoff(kept, "local")
        assert receipt.prefilled_tokens == 0
        moved = pair.ask_receiver.answer(HeldCache(receipt.cache_id), asked[2], sampling=GREEDY)
        assert ids_of(moved) == unbroken
        assert moved.final.cached_tokens == receipt.tokens


def test_keep_at_the_receiver(pair):
    receipt = handed(pair, codec="int8")
    first = pair.ask_receiver.answer(
        HeldCache(receipt.cache_id), Question("One?"), sampling=GREEDY, keep=True
    )
    generated = ids_of(first)
    kept = first.final.kept_cache_id
    stored = pair.receiver_node.parts.store.find("default", kept)
    assert stored.trust == "lossy"
    assert list(stored.ids[-len(generated) :]) == generated
    assert len(stored.ids) == stored.cache.length
    second = pair.ask_receiver.answer(HeldCache(kept), Question("Two?"), sampling=GREEDY)
    assert len(ids_of(second)) == 12
    assert second.final.path == "lossy"
    assert second.final.cached_tokens == len(stored.ids)


def test_a_held_prefix_that_grew_prefills_only_the_tail(pair):
    short, long = IDS[:40], (*IDS[:40], 9, 8, 7, 6, 5)
    pair.ask_sender.prefill(TokenIds(short))
    counted = pair.sender_engine.model_tokens
    receipt = handed(pair, TokenIds(long))
    assert receipt.prefilled_tokens == 5
    assert pair.sender_engine.model_tokens - counted == 5


def test_one_prefill_serves_two_codecs(pair):
    counted = pair.sender_engine.model_tokens
    handed(pair, TokenIds(IDS), "native")
    handed(pair, TokenIds(IDS), "int4+zstd")
    assert pair.sender_engine.model_tokens - counted == len(IDS)
    assert len(IDS) > BLOCK_TOKENS
