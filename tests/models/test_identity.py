"""Identities of real models: what changes them, and what must not."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from blake3 import blake3
from tokenizers import normalizers, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from cachelink_core.engine.identify import (
    CONFIG_LEFT_OUT,
    adapter_digest,
    config_digest,
    identify,
    template_digest,
    vocabulary_digest,
)
from cachelink_core.engine.loading import load_tokenizer
from cachelink_core.engine.weights_digest import (
    DigestCache,
    file_digest,
    named_tensors,
    tensors_digest,
    weights_digest,
)
from cachelink_core.errors import UnsupportedModel
from cachelink_core.identity import ModelIdentity, diff
from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.tiny_models import save_tiny, tiny_model
from cachelink_core.testing.tiny_tokenizer import tiny_tokenizer


def identity_of(model, tokenizer=None) -> ModelIdentity:
    return identify(model, tokenizer or tiny_tokenizer(), KeyRope.probe(model))


def fields_that_differ(a: ModelIdentity, b: ModelIdentity) -> set[str]:
    return {d.field.partition(".")[0].partition("[")[0] for d in diff(a, b)}


# --- the whole ---


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "ministral3"])
def test_saved_and_loaded_is_the_same_identity(family, tmp_path):
    save_tiny(family, tmp_path, dtype=torch.bfloat16)
    built = identity_of(tiny_model(family, dtype=torch.bfloat16))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert diff(built, identity_of(loaded, load_tokenizer(str(tmp_path)))) == ()
    assert built.dtype == "bfloat16"
    assert built.architecture == type(loaded).__name__


def test_shards_do_not_matter(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert identity_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == identity_of(model)


def test_each_change_is_named_by_its_own_field():
    base = identity_of(tiny_model("llama"))
    other_tokenizer = tiny_tokenizer()
    other_tokenizer.add_tokens(["extra"])
    other_template = tiny_tokenizer()
    other_template.chat_template = "{{ messages[0]['content'] }}"
    changed = {
        "weights_digest": identity_of(tiny_model("llama", seed=1)),
        "config_digest": identity_of(tiny_model("llama", rms_norm_eps=1e-3)),
        "max_positions": identity_of(tiny_model("llama", max_position_embeddings=100_000)),
        "vocabulary_digest": identity_of(tiny_model("llama"), other_tokenizer),
        "template_digest": identity_of(tiny_model("llama"), other_template),
        "rope": identity_of(
            tiny_model("llama", rope_scaling={"rope_type": "linear", "factor": 2.0})
        ),
    }
    for field, identity in changed.items():
        # The window is named twice where RoPE parameters hold it too.
        allowed = {field, "rope"} if field == "max_positions" else {field}
        assert field in fields_that_differ(base, identity)
        assert fields_that_differ(base, identity) <= allowed
    assert "dtype" in fields_that_differ(
        base, identity_of(tiny_model("llama", dtype=torch.bfloat16))
    )


def test_a_model_of_no_window_is_refused():
    model = tiny_model("llama")
    rope = KeyRope.probe(model)
    object.__setattr__(model.config, "max_position_embeddings", None)
    with pytest.raises(UnsupportedModel, match="max_position_embeddings is None"):
        identify(model, tiny_tokenizer(), rope)


def test_a_dtype_that_no_cache_has_is_refused():
    model = tiny_model("llama")
    rope = KeyRope.probe(model)
    with pytest.raises(UnsupportedModel, match=r"dtype is torch\.float64"):
        identify(model.to(torch.float64), tiny_tokenizer(), rope)


@pytest.mark.slow
def test_no_digest_depends_on_the_hash_seed(tmp_path):
    save_tiny("llama", tmp_path)
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M\n"
        "from cachelink_core.engine.identify import identify\n"
        "from cachelink_core.engine.loading import load_tokenizer\n"
        "from cachelink_core.kv.rope import KeyRope\n"
        "m = M.from_pretrained(sys.argv[1]); t = load_tokenizer(sys.argv[1])\n"
        "print(identify(m, t, KeyRope.probe(m)).digest())"
    )
    root = Path(__file__).parents[2]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4711")
    ]
    digests = {run.communicate(timeout=120)[0].strip() for run in runs}
    here = identity_of(
        AutoModelForCausalLM.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    )
    assert digests == {here.digest()}


# --- configuration ---


def test_informational_fields_do_not_count():
    plain = LlamaConfig().to_dict()
    noisy = {**plain, **dict.fromkeys(CONFIG_LEFT_OUT, "anything")}
    assert config_digest(plain) == config_digest(noisy)


def test_an_absent_field_is_an_empty_one():
    assert config_digest({"a": 1, "b": None}) == config_digest({"a": 1})


@pytest.mark.parametrize("field", ["hidden_size", "hidden_act", "num_attention_heads", "head_dim"])
def test_fields_that_shape_the_computation_count(field):
    plain = LlamaConfig().to_dict()
    assert config_digest(plain) != config_digest({**plain, field: 77})


def test_nested_configurations_are_read_too():
    nested = {"text_config": {"hidden_size": 8, "use_cache": True}}
    assert config_digest(nested) == config_digest({"text_config": {"hidden_size": 8}})
    assert config_digest(nested) != config_digest({"text_config": {"hidden_size": 9}})


def test_floats_count_as_the_float32_that_is_computed_with():
    assert config_digest({"eps": 1e-5}) == config_digest({"eps": 9.999999747378752e-06})
    assert config_digest({"eps": 1e-5}) != config_digest({"eps": 1.0001e-5})
    assert config_digest({"limit": 1e300}) != config_digest({"limit": 1e301})


def test_every_left_out_field_has_a_reason():
    assert all(reason.strip() for reason in CONFIG_LEFT_OUT.values())


# --- weights ---


def test_tied_weights_count_once():
    tied = tiny_model("llama", tie_word_embeddings=True)
    names = named_tensors(tied)
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    untied = named_tensors(tiny_model("llama"))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= untied.keys()


def test_every_part_of_a_tensor_counts():
    base = {"w": torch.arange(6.0).reshape(2, 3)}
    others = [
        {"v": base["w"]},
        {"w": base["w"].reshape(3, 2)},
        {"w": base["w"].to(torch.bfloat16)},
        {"w": base["w"].neg()},
        {"w": base["w"], "x": torch.zeros(0)},
    ]
    assert len({tensors_digest(tensors) for tensors in [base, *others]}) == 6


def test_order_and_strides_do_not_count():
    a, b = torch.randn(3, 4), torch.randn(2)
    assert tensors_digest({"a": a, "b": b}) == tensors_digest({"b": b, "a": a.t().contiguous().t()})


def test_one_bit_of_one_weight_changes_the_digest():
    model = tiny_model("qwen2")
    before = weights_digest(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[0] += 1e-7
    assert weights_digest(model) != before


# --- vocabulary and template ---


def change_merges(tokenizer):
    state = msgspec.json.decode(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = state["model"]["merges"][::-1]
    return SimpleNamespace(
        backend_tokenizer=SimpleNamespace(to_str=lambda: msgspec.json.encode(state).decode())
    )


def with_normalizer(tokenizer):
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def with_digits(tokenizer):
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
    )
    return tokenizer


def with_special(tokenizer):
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return tokenizer


@pytest.mark.parametrize("change", [change_merges, with_normalizer, with_digits, with_special])
def test_what_decides_ids_changes_the_vocabulary_digest(change):
    assert vocabulary_digest(change(tiny_tokenizer())) != vocabulary_digest(tiny_tokenizer())


def test_padding_and_truncation_do_not_change_the_vocabulary_digest():
    tokenizer = tiny_tokenizer()
    before = vocabulary_digest(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer("text", split_special_tokens=True)
    assert vocabulary_digest(tokenizer) == before


def test_merges_written_as_pairs_or_as_text_are_the_same():
    tokenizer = tiny_tokenizer()
    state = msgspec.json.decode(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    older = SimpleNamespace(
        backend_tokenizer=SimpleNamespace(to_str=lambda: msgspec.json.encode(state).decode())
    )
    assert vocabulary_digest(older) == vocabulary_digest(tokenizer)


def test_no_template_is_the_digest_of_nothing():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert template_digest(tokenizer) == blake3(b"").hexdigest()
    assert template_digest(tiny_tokenizer()) != template_digest(tokenizer)


# --- adapters ---


class LoraLinear(nn.Module):
    """A linear layer as PEFT wraps it: same names, no PEFT needed."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapter = ["default"]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})


def with_lora(seed: int = 0):
    model = tiny_model("llama")
    torch.manual_seed(seed)
    attention = model.model.layers[0].self_attn
    attention.q_proj = LoraLinear(attention.q_proj)
    model.peft_config = {
        "default": SimpleNamespace(r=2, target_modules={"q_proj"}, base_model_name_or_path="x")
    }
    return model


def test_no_adapter_has_an_empty_digest():
    assert adapter_digest(tiny_model("llama")) == ""


def test_an_adapter_has_a_digest_of_its_own_and_leaves_the_weights_digest_alone():
    assert len(adapter_digest(with_lora())) == 64
    assert weights_digest(with_lora()) == weights_digest(tiny_model("llama"))


def test_other_adapter_tensors_or_parameters_are_another_adapter():
    other_rank = with_lora()
    other_rank.peft_config["default"].r = 3
    elsewhere = with_lora()
    elsewhere.peft_config["default"].base_model_name_or_path = "y"
    digests = [adapter_digest(m) for m in (with_lora(), with_lora(1), other_rank)]
    off = with_lora()
    off.model.layers[0].self_attn.q_proj.disable_adapters = True
    digests.append(adapter_digest(off))
    assert len(set(digests)) == 4
    assert adapter_digest(elsewhere) == digests[0]


def test_an_adapter_of_an_unknown_kind_is_refused():
    model = tiny_model("llama")
    model.peft_config = {"default": SimpleNamespace(r=2)}
    with pytest.raises(UnsupportedModel, match="no tensors that are known here"):
        adapter_digest(model)


# --- digests on disk ---


def test_a_digest_is_remembered_until_the_file_changes(tmp_path):
    cache = DigestCache(tmp_path / "digests")
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"one")
    assert cache.get("weights", [source]) is None
    cache.put("weights", [source], "aa")
    assert DigestCache(tmp_path / "digests").get("weights", [source]) == "aa"
    assert cache.get("weights float32", [source]) is None
    source.write_bytes(b"two")
    os.utime(source, ns=(1, 1))
    assert cache.get("weights", [source]) is None


def test_a_broken_remembered_digest_is_computed_again(tmp_path):
    cache = DigestCache(tmp_path / "digests")
    source = tmp_path / "file"
    source.write_bytes(b"content")
    digest = file_digest(source, cache)
    assert digest == blake3(b"content").hexdigest()
    (remembered,) = (tmp_path / "digests").iterdir()
    remembered.write_text("{")
    assert file_digest(source, cache) == digest
    assert cache.get("file", [source]) == digest
