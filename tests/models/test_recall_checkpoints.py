"""The committed models of the recall pair answer from their cache, and from nothing else."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from cachelink_bench.recall_pair import words
from cachelink_bench.recall_pair.models import SHAPES, Role
from cachelink_bench.recall_pair.recall import recall, recall_by_facts, stop_rate
from cachelink_bench.recall_pair.task import Document, held_out_documents
from cachelink_bench.recall_pair.tokenizer import recall_tokenizer

FOLDER = Path(__file__).parents[2] / "bench" / "models" / "recall"
MAX_BYTES = 5_000_000
SEED = 77


@pytest.fixture(scope="module", params=list(Role))
def role(request):
    return request.param


@pytest.fixture(scope="module")
def model(role):
    return AutoModelForCausalLM.from_pretrained(FOLDER / role, dtype=torch.bfloat16)


def test_weights_are_bf16_and_small(role):
    path = FOLDER / role / "model.safetensors"
    assert path.stat().st_size < MAX_BYTES
    with safe_open(path, framework="pt") as weights:
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {"BF16"}


def test_the_model_has_the_shape_of_its_role(role, model):
    shape, config = SHAPES[role], model.config
    assert (config.num_hidden_layers, config.hidden_size) == (shape.layers, shape.width)
    assert config.vocab_size == len(words.VOCABULARY)


def test_the_saved_tokenizer_is_the_task_s(role):
    saved = AutoTokenizer.from_pretrained(FOLDER / role)
    text = held_out_documents(1, 64, SEED)[0].text
    assert saved(text).input_ids == recall_tokenizer()(text).input_ids
    assert saved.get_vocab() == dict(words.TOKEN_IDS)


def test_both_models_have_the_same_tokenizer_file():
    assert len({(FOLDER / role / "tokenizer.json").read_bytes() for role in Role}) == 1


def test_recall_on_held_out_documents(model):
    recalls = recall_by_facts(model, documents=8, queries=8, seed=SEED)
    assert min(recalls.values()) >= 0.95, recalls


def test_without_its_own_document_the_model_is_at_chance(model):
    drawn = held_out_documents(16, 8, SEED)
    empty = [Document((words.BOS_ID,), "", {}, document.queries) for document in drawn]
    swapped = [
        Document(other.prefix_ids, other.text, other.facts, document.queries)
        for document, other in zip(drawn, [*drawn[1:], drawn[0]], strict=True)
    ]
    assert recall(model, empty, queries=8) <= 0.1
    assert recall(model, swapped, queries=8) <= 0.1


def test_recall_does_not_depend_on_padding(model):
    documents = held_out_documents(4, 8, SEED)
    right = 0
    for document in documents:
        for query_ids, answer_id in document.queries[:2]:
            tokens = torch.tensor([[*document.prefix_ids, *query_ids]])
            right += int(model(tokens).logits[0, -1].argmax()) == answer_id
    assert recall(model, documents, queries=2) == right / 8


def test_the_model_ends_its_answers_after_long_documents(model):
    """After short ones it often does not: the model folder's README has the rates."""
    assert stop_rate(model, held_out_documents(8, 32, SEED), queries=4) >= 0.95


def test_an_answer_reads_as_text_and_stops(role, model):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / role)
    document = held_out_documents(1, 32, SEED)[0]
    subject, action = next(iter(document.facts.items()))
    inputs = tokenizer(f"{document.text} ? {subject}", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    new = output[0, inputs.input_ids.shape[1] :]
    assert new[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(new, skip_special_tokens=True) == action
