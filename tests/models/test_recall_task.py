"""The recall task: what a document states, what is asked, and that nothing leaks between streams."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachelink_bench.recall_pair import words
from cachelink_bench.recall_pair.batches import MAX_QUERIES, fact_batch, training_batch
from cachelink_bench.recall_pair.task import (
    MAX_FACTS,
    Stream,
    calibration_sequences,
    document,
    generator,
    held_out_documents,
    plain_sentence,
)
from cachelink_bench.recall_pair.tokenizer import recall_tokenizer

seeds = st.integers(min_value=0, max_value=2**32)


def test_the_vocabulary_has_no_word_twice():
    assert len(set(words.VOCABULARY)) == len(words.VOCABULARY)
    assert len(words.SUBJECTS) == len(words.ACTIONS) == MAX_FACTS == 64


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(min_value=0, max_value=MAX_FACTS))
def test_a_document_states_its_facts_and_asks_for_each_once(seed, facts):
    drawn = document(np.random.default_rng(seed), facts)
    sentences = [sentence.strip() for sentence in drawn.text.split(".")]
    assert len(drawn.facts) == len(set(drawn.facts.values())) == facts
    for subject, action in drawn.facts.items():
        assert sentences.count(f"{subject} {action}") == 1
    assert sum(sentence.split()[:1] != ["the"] for sentence in sentences if sentence) == facts
    asked = [words.VOCABULARY[query.query_ids[1]] for query in drawn.queries]
    answers = [words.VOCABULARY[query.answer_id] for query in drawn.queries]
    assert dict(zip(asked, answers, strict=True)) == drawn.facts
    assert len(asked) == facts


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(min_value=0, max_value=MAX_FACTS))
def test_text_and_tokens_of_a_document_are_the_same(seed, facts):
    tokenizer = recall_tokenizer()
    drawn = document(np.random.default_rng(seed), facts)
    assert tuple(tokenizer(drawn.text).input_ids) == drawn.prefix_ids
    assert tokenizer.decode(drawn.prefix_ids, skip_special_tokens=True) == drawn.text
    for query in drawn.queries:
        text = tokenizer.decode(query.query_ids)
        assert tuple(tokenizer(text, add_special_tokens=False).input_ids) == query.query_ids


def test_a_word_outside_the_vocabulary_is_unknown_and_special_text_can_be_plain():
    tokenizer = recall_tokenizer()
    assert tokenizer("Ada sneezes.").input_ids == [
        words.BOS_ID,
        words.TOKEN_IDS["Ada"],
        words.UNK_ID,
        words.STOP_ID,
    ]
    plain = tokenizer("<eos>", add_special_tokens=False, split_special_tokens=True).input_ids
    assert words.EOS_ID not in plain


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_plain_sentences_hold_no_word_of_a_fact(seed):
    sentence = plain_sentence(np.random.default_rng(seed))
    assert set(sentence) <= set(words.PLAIN_WORDS)
    assert not set(sentence) & {*words.SUBJECTS, *words.ACTIONS}


@pytest.mark.parametrize("facts", [-1, MAX_FACTS + 1])
def test_an_impossible_number_of_facts_is_refused_with_both_numbers(facts):
    with pytest.raises(ValueError, match=rf"facts is {facts}, .* 0 to {MAX_FACTS}"):
        document(np.random.default_rng(0), facts)


def test_held_out_documents_depend_on_the_seed_alone():
    assert held_out_documents(3, 8, seed=5) == held_out_documents(6, 8, seed=5)[:3]
    assert held_out_documents(3, 8, seed=5) != held_out_documents(3, 8, seed=6)
    texts = [drawn.text for drawn in held_out_documents(50, 8, seed=5)]
    assert len(set(texts)) == 50


def test_equal_seeds_of_other_streams_give_other_documents():
    held_out = {drawn.prefix_ids[:12] for drawn in held_out_documents(40, 8, seed=1)}
    calibration = {ids[:12] for ids in calibration_sequences(40, 12, seed=1)}
    training = {
        tuple(row[:12].tolist())
        for step in range(1, 41, 2)
        for row in training_batch(seed=1, step=step, facts=8, rows=2).tokens
    }
    assert not held_out & calibration
    assert not held_out & training
    assert not calibration & training
    assert len(held_out) == len(calibration) == len(training) == 40


def test_no_action_belongs_to_a_subject():
    """A model that knows only the subject is right once in 64: the answer is not in the weights."""
    pairs = Counter(
        (subject, action)
        for drawn in held_out_documents(400, 32, seed=0)
        for subject, action in drawn.facts.items()
    )
    best_guess = Counter()
    for (subject, _), count in pairs.items():
        best_guess[subject] = max(best_guess[subject], count)
    # 200 statements a subject, 3.1 for each action on average; 15 is beyond six standard errors.
    assert max(best_guess.values()) < 15


@pytest.mark.parametrize("length", [1, 2, 100, 700])
def test_calibration_sequences_have_their_exact_length(length):
    sequences = calibration_sequences(4, length, seed=3)
    assert [len(ids) for ids in sequences] == [length] * 4
    assert all(ids[0] == words.BOS_ID and ids.count(words.BOS_ID) == 1 for ids in sequences)
    assert sequences == calibration_sequences(5, length, seed=3)[:4]


def test_calibration_text_mixes_facts_and_plain_sentences():
    ids = [token for sequence in calibration_sequences(8, 200, seed=0) for token in sequence]
    kinds = Counter(_kind(words.VOCABULARY[token]) for token in ids)
    assert kinds["subject"] > 200
    assert kinds["plain"] > 100


def test_a_fact_batch_marks_exactly_the_answers():
    facts = 20
    batch = fact_batch(generator(Stream.TRAINING, 0, 0), rows=6, facts=facts)
    for tokens, answers, text in zip(batch.tokens, batch.answers, batch.text, strict=True):
        row = [words.VOCABULARY[token] for token in tokens[text].tolist()]
        start = row.index("?")
        stated = dict(pairwise(row[:start]))
        asked = row[start:]
        assert len(asked) == 4 * MAX_QUERIES
        assert set(asked[0::4]) == {"?"}
        assert set(asked[3::4]) == {"<eos>"}
        assert len(set(asked[1::4])) == MAX_QUERIES
        assert [stated[subject] for subject in asked[1::4]] == asked[2::4]
        assert [words.VOCABULARY[token] for token in tokens[answers].tolist()] == asked[2::4]
        length = int(text.sum())
        assert bool(text[:length].all())
        assert bool((tokens[length:] == words.PAD_ID).all())


def test_a_repeated_batch_asks_for_the_second_copy_only():
    batch = training_batch(seed=0, step=4, facts=6, rows=3)
    length = (batch.tokens.shape[1] - 1) // 2
    first, second = batch.tokens[:, 1 : length + 1], batch.tokens[:, length + 1 :]
    assert torch.equal(first, second)
    assert not bool(batch.answers[:, : length + 2].any())
    assert bool(batch.answers[:, length + 2 :].all())
    assert not bool(batch.text.any())


def test_a_training_batch_is_a_function_of_seed_and_step():
    same = [training_batch(seed=3, step=7, facts=10, rows=4).tokens for _ in range(2)]
    assert torch.equal(*same)
    for seed, step in ((4, 7), (3, 9)):
        other = training_batch(seed=seed, step=step, facts=10, rows=4).tokens
        assert other.shape != same[0].shape or not torch.equal(other, same[0])


def _kind(word):
    if word in words.SUBJECTS:
        return "subject"
    return "plain" if word in words.PLAIN_WORDS else "other"
