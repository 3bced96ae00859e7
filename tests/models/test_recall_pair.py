"""The committed mappers of the recall pair: reconstruction and use, told apart by the gate."""

import pytest

from cachelink_bench.recall_pair.pair import (
    MODELS,
    QUERIES,
    RecallExamples,
    example,
    load_pair,
    training_data,
)
from cachelink_bench.recall_pair.pair_eval import (
    CACHELINK,
    MISMATCHED,
    NATIVE,
    SENDER,
    ZEROED,
    PairEvaluator,
    gate_examples,
    pair_gate,
    place,
)
from cachelink_bench.recall_pair.task import held_out_documents
from cachelink_bench.recall_pair.words import ASK_ID, EOS_ID
from cachelink_core.fit.train_data import data_digest
from cachelink_core.transport.artifact import load_state, verify_mapper
from cachelink_core.transport.pairing import check_pair

MAPPERS = MODELS / "mappers"
NAMES = ("ridge", "cachelink")
MAX_BYTES = 5_000_000


@pytest.fixture(scope="module")
def pair():
    return load_pair()


@pytest.mark.parametrize("name", NAMES)
def test_artifacts_are_whole_small_and_of_these_models(pair, name):
    card = verify_mapper(MAPPERS / name)
    check_pair(card, pair.sender.identity, pair.receiver.identity)
    assert sum(file.stat().st_size for file in (MAPPERS / name).iterdir()) < MAX_BYTES
    assert (card.residual is not None) == (name == "cachelink")


def test_both_have_the_same_ridge():
    ridge, learned = (load_state(MAPPERS / name) for name in NAMES)
    for name, tensor in ridge.tensors.items():
        assert learned.tensors[name].equal(tensor)


def test_the_cards_say_that_ridge_fails_and_cachelink_passes():
    ridge, learned = (verify_mapper(MAPPERS / name).gate for name in NAMES)
    assert not ridge.passed
    assert learned.passed
    assert ridge.text_digest == learned.text_digest == data_digest(gate_examples())
    assert ridge.kl["own"] == learned.kl["own"] == 0.0


def test_the_gate_repeats_on_fewer_documents(pair):
    ridge, learned = (pair_gate(pair, load_state(MAPPERS / n), documents=2).record for n in NAMES)
    assert not ridge.passed
    assert learned.passed


def test_recall_is_recovered_where_reconstruction_is_not(pair):
    states = {n: load_state(MAPPERS / n) for n in NAMES}
    mappers = {"Ridge": place(pair, states["ridge"]), CACHELINK: place(pair, states["cachelink"])}
    found = PairEvaluator(pair, mappers, documents=6, queries=4, fact_counts=(16,)).scores()[16]
    recall = {arm: score.recall for arm, score in found.items()}
    assert min(recall[NATIVE], recall[SENDER]) >= 0.95
    assert max(recall["Ridge"], recall[MISMATCHED], recall[ZEROED]) <= 0.3
    assert recall[CACHELINK] >= (recall[NATIVE] + recall["Ridge"]) / 2
    assert found[NATIVE].kl == 0
    assert found[CACHELINK].mean_kl < found["Ridge"].mean_kl / 2


def test_an_example_asks_one_query_after_the_other():
    drawn = held_out_documents(1, 3, seed=1)[0]
    found = example(drawn, QUERIES)
    assert found.prefix_ids == drawn.prefix_ids
    first, second, third = drawn.queries
    assert found.query_ids == first.query_ids
    assert found.continuation_ids == (
        first.answer_id, EOS_ID, *second.query_ids, second.answer_id, EOS_ID,
        *third.query_ids, third.answer_id, EOS_ID,
    )  # fmt: skip
    assert found.query_ids[0] == ASK_ID


def test_training_documents_follow_from_their_seed():
    first, again, other = RecallExamples(0, 50), RecallExamples(0, 50), RecallExamples(1, 50)
    assert list(first[:5]) == [again[i] for i in range(5)]
    assert first[0] != other[0]
    assert len(set(first)) == 50
    with pytest.raises(IndexError):
        first[50]
    assert training_data(0).digest != training_data(1).digest
