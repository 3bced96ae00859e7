"""The test models themselves: saved and loaded they stay what they were, and so does their text."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.tiny_models import VOCABULARY, save_tiny, tiny_model
from cachelink_core.testing.tiny_tokenizer import BOS_ID, IM_END_ID, IM_START_ID, tiny_tokenizer

TEXT = "the thing and <s> over é 漢\n\n  123 it's <|im_end|>x"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "ministral3"])
def test_a_saved_model_is_the_same_model(family, dtype, tmp_path):
    model = tiny_model(family, dtype=dtype, seed=2)
    folder = save_tiny(family, tmp_path / "model", dtype=dtype, seed=2)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == dtype
    ids = torch.arange(40).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    ours, theirs = KeyRope.probe(model), KeyRope.probe(loaded)
    assert ours.tables_digest(10_000) == theirs.tables_digest(10_000)
    assert ours.parameters == theirs.parameters
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT).input_ids == tiny_tokenizer()(TEXT).input_ids
    assert len(tokenizer) <= VOCABULARY


def test_tokenizer_returns_text_and_adds_nothing():
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.decode(ids) == TEXT
    assert ids.count(BOS_ID) == 1  # the one that is written in the text
    assert tokenizer("").input_ids == []


def test_a_text_can_be_written_in_other_tokens():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["t", "h", "e"])
    assert tokenizer.decode(ids) == "the"
    assert tokenizer("the").input_ids != ids


def test_chat_template_frames_messages():
    rendered = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert rendered[0] == IM_START_ID
    assert rendered.count(IM_END_ID) == 1
    assert tiny_tokenizer().decode(rendered).endswith("<|im_start|>assistant\n")


def test_key_biases_are_large_constants_in_a_few_channels():
    plain = tiny_model("qwen2")
    biased = tiny_model("qwen2", key_bias=300.0)
    change = (
        biased.model.layers[0].self_attn.k_proj.bias - plain.model.layers[0].self_attn.k_proj.bias
    )
    per_head = change.view(2, 16)
    assert (per_head.abs() > 40).sum(dim=1).tolist() == [4, 4]
    assert float(per_head.abs().max()) == pytest.approx(300.0)
    assert (per_head.abs() < 1e-3).sum(dim=1).tolist() == [12, 12]
