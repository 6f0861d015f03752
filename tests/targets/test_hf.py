"""The frozen target: taps, head, isolation of packed documents, and decoding with a cache."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from draftsmith.config import TargetOptions
from draftsmith.errors import UserError
from draftsmith.losses import drafted_rows, frozen_head_loss
from draftsmith.shapes import default_layer_ids
from draftsmith.targets.hf import HFTarget, choose_mask_token, fingerprint, load_target
from draftsmith.types import Sample
from tests.handmade import block_shape, pack_of, shape_of, tiny_drafter
from tests.tiny import NUM_TOKENS, tiny_target, tiny_tokenizer

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize(("kind", "tied"), [(k, t) for k in ("llama", "qwen2", "qwen3") for t in (True, False)])


def target_of(kind: str = "qwen3", *, tied: bool = True, layer_ids: tuple[int, ...] = (0, 2)) -> HFTarget:
    return HFTarget(tiny_target(kind, tied=tied), tiny_tokenizer(), layer_ids)


def text(length: int, seed: int) -> Sample:
    """A random, wholly supervised document."""
    tokens = torch.randint(3, NUM_TOKENS, (length,), generator=torch.Generator().manual_seed(seed)).numpy()
    return Sample(id=str(seed), tokens=tokens, supervised=tokens > 0)


def pack(*documents: Sample, num_tokens: int | None = None):
    return pack_of(list(documents), [[] for _ in documents], block_shape(4), num_tokens=num_tokens)


def hidden_states(kind: str, tied: bool, tokens: torch.Tensor, layer_ids) -> torch.Tensor:
    """The tapped features as transformers itself gives them, from a model of its own."""
    out = tiny_target(kind, tied=tied)(input_ids=tokens[None], output_hidden_states=True)
    return torch.cat([out.hidden_states[i + 1][0] for i in layer_ids], dim=-1)


# Capturing


@KINDS
@torch.no_grad()
def test_features_are_the_outputs_of_the_tapped_blocks(kind, tied):
    """Feature i is hidden_states[i + 1] of transformers, in the order of the ids."""
    sample = text(30, seed=1)
    captured = target_of(kind, tied=tied, layer_ids=(2, 0, 1)).capture(pack(sample)).context
    expected = hidden_states(kind, tied, torch.from_numpy(sample.tokens), (2, 0, 1))
    torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-4)


@KINDS
def test_packed_documents_are_the_documents_alone(kind, tied):
    target = target_of(kind, tied=tied)
    documents = [text(30, seed=1), text(5, seed=2), text(40, seed=3)]
    together = target.capture(pack(*documents, num_tokens=90)).context  # 15 tokens of padding
    alone = torch.cat([target.capture(pack(d)).context for d in documents])
    torch.testing.assert_close(together[:75], alone, rtol=1e-4, atol=1e-4)
    assert together.isfinite().all()


def test_positions_given_to_the_target_restart_with_each_document():
    """Attention is relative, so features would hardly show it; tables for long positions would."""
    target, seen = target_of(), []
    target.model.model.layers[0].register_forward_pre_hook(
        lambda _module, _args, given: seen.append(given["position_ids"][0].tolist()), with_kwargs=True
    )
    target.capture(pack(text(4, seed=1), text(3, seed=2), num_tokens=9))
    assert seen == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]


def loss_and_gradients(target: HFTarget, documents: list[Sample], anchors: list[list[int]]):
    """The summed loss of the blocks at these anchors, and the drafter's gradients."""
    drafter = tiny_drafter(block_size=8)
    batch = pack_of(documents, anchors, shape_of(drafter))
    blocks = batch.blocks
    draft = drafter(target.capture(batch), batch.position, target.embed(blocks.tokens), blocks)
    rows = blocks.rows[: blocks.num_rows]
    label, weight = blocks.label.flatten()[rows], blocks.weight.flatten()[rows]
    total = frozen_head_loss(drafted_rows(draft, rows), target.head, label, weight, chunk=16).total
    total.backward()
    return total.detach(), [w.grad for w in drafter.parameters()]


def test_training_on_a_pack_is_training_on_its_documents():
    """Documents of 30, 5 and 40 tokens, blocks of 8 (the second is too short for one): loss and gradients add up."""
    target = target_of()
    documents = [text(30, seed=1), text(5, seed=2), text(40, seed=3)]
    anchors = [[3, 12, 25], [1, 3], [0, 20, 38]]
    total, gradients = loss_and_gradients(target, documents, anchors)
    alone = [loss_and_gradients(target, [d], [a]) for d, a in zip(documents, anchors, strict=True)]
    torch.testing.assert_close(total, sum(one for one, _ in alone), rtol=1e-5, atol=0)
    for name, gradient in enumerate(gradients):
        expected = sum(grads[name] for _, grads in alone)
        assert (gradient - expected).norm() < 1e-4 * expected.norm()


def test_nothing_runs_behind_the_last_tap():
    """Blocks 0 to 2 run once; block 3, the final norm and the head do not."""
    target = target_of(layer_ids=(0, 2))
    ran = Counter()
    parts = {f"block {i}": block for i, block in enumerate(target.model.model.layers)}
    parts |= {"norm": target.model.model.norm, "head": target.model.lm_head}
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: ran.update([name]))
    target.capture(pack(text(9, seed=1)))
    assert ran == {"block 0": 1, "block 1": 1, "block 2": 1}


def test_target_is_frozen():
    target = target_of()
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not target.model.training
    assert not target.capture(pack(text(9, seed=1))).context.requires_grad


# Head and embedding


@KINDS
def test_head_is_the_targets_own(kind, tied):
    """Bitwise the embedding when tied, although no lm_head is in the files; else lm_head."""
    target = target_of(kind, tied=tied)
    embedding = target.embed(torch.arange(320))
    assert torch.equal(target.head, embedding) == tied
    assert torch.equal(target.head, target.model.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_head_after_loading_from_files(tmp_path, tied):
    model = tiny_target(tied=tied)
    save(model, tmp_path)
    target = load_target(TargetOptions(path=str(tmp_path), layer_ids=(1,)), CPU)
    assert torch.equal(target.head, model.lm_head.weight)
    assert torch.equal(target.embed(torch.arange(320)), model.model.embed_tokens.weight)


# Decoding


@KINDS
@torch.no_grad()
def test_extend_equals_a_plain_forward(kind, tied):
    """Logits and features of a document that comes in pieces."""
    target, tokens = target_of(kind, tied=tied), torch.from_numpy(text(25, seed=4).tokens)
    cache = target.new_cache()
    pieces = [target.extend(part, cache) for part in tokens.split([10, 1, 8, 6])]
    plain = tiny_target(kind, tied=tied)(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(torch.cat([logits for logits, _ in pieces]), plain, rtol=1e-4, atol=1e-4)
    features = hidden_states(kind, tied, tokens, target.layer_ids)
    torch.testing.assert_close(torch.cat([f for _, f in pieces]), features, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_extend_after_the_cache_fell_back():
    """Rejected tokens leave no trace: extending from the shortened cache is extending the committed text."""
    target, tokens = target_of(), torch.from_numpy(text(25, seed=4).tokens)
    cache = target.new_cache()
    target.extend(torch.cat([tokens[:12], torch.tensor([7, 8, 9])]), cache)
    cache.crop(-3)
    logits, features = target.extend(tokens[12:], cache)
    plain = tiny_target("qwen3")(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(logits, plain[12:], rtol=1e-4, atol=1e-4)
    expected = hidden_states("qwen3", True, tokens, target.layer_ids)
    torch.testing.assert_close(features, expected[12:], rtol=1e-4, atol=1e-4)


def test_capturing_between_two_extensions_disturbs_neither():
    target, tokens = target_of(), torch.from_numpy(text(20, seed=4).tokens)
    cache = target.new_cache()
    target.extend(tokens[:10], cache)
    captured = target.capture(pack(text(9, seed=5))).context
    _, features = target.extend(tokens[10:], cache)
    assert captured.shape[0] == 9
    torch.testing.assert_close(
        features, hidden_states("qwen3", True, tokens, target.layer_ids)[10:].detach(), rtol=1e-4, atol=1e-4
    )


def test_stop_tokens_are_those_of_model_and_tokenizer():
    model = tiny_target()
    model.generation_config.eos_token_id = [2, 5]
    assert HFTarget(model, tiny_tokenizer(), (0,)).eos_ids == {2, 5}


# Layer ids


@pytest.mark.parametrize(
    ("num_target_layers", "ids"),
    [
        (36, (1, 9, 17, 25, 33)),
        (64, (1, 16, 31, 46, 61)),
        (40, (1, 10, 19, 28, 37)),
        (32, (1, 8, 15, 22, 29)),
        (24, (1, 6, 11, 16, 21)),
    ],
)
def test_default_layer_ids_are_dflashs(num_target_layers, ids):
    assert default_layer_ids(num_target_layers, 5) == ids


def test_one_draft_layer_taps_the_middle():
    assert default_layer_ids(36, 1) == (18,)


@pytest.mark.parametrize("num_target_layers", range(2, 12))
def test_default_layer_ids_of_shallow_targets_can_be_tapped(num_target_layers):
    """Distinct and before the last block, but for two-layer targets, which the check then refuses."""
    for num_draft_layers in range(1, 9):
        ids = default_layer_ids(num_target_layers, num_draft_layers)
        assert len(set(ids)) == len(ids)
        assert num_target_layers == 2 or all(0 <= i < num_target_layers - 1 for i in ids)


@pytest.mark.parametrize("ids", [(3,), (0, 4), (-1,), (1, 1), ()])
def test_layer_ids_that_cannot_be_tapped_are_refused(world, ids):
    """The target has blocks 0 to 3; the last one's entry in transformers is already normed."""
    with pytest.raises(UserError, match=r"target\.layer_ids .* from 0 to 2"):
        load_target(TargetOptions(path=str(world / "target"), layer_ids=ids), CPU)


# Loading


def save(model, folder) -> None:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def change_config(folder, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_loaded_target_computes_in_float32_on_a_cpu(world):
    target = load_target(TargetOptions(path=str(world / "target")), CPU, num_draft_layers=2)
    assert target.head.dtype == torch.float32
    assert target.layer_ids == (2,)  # too shallow to spread over


@pytest.mark.parametrize(("path", "reason"), [("", "target.path is not given"), ("nowhere/at/all", "no such folder")])
def test_paths_without_a_target_are_refused(path, reason):
    with pytest.raises(UserError, match=reason):
        load_target(TargetOptions(path=path), CPU)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        load_target(TargetOptions(path=str(tmp_path)), CPU)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "gpt2"}, "of family 'gpt2'; supported: llama, qwen2, qwen3"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "sliding-window layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"is quantised \(awq\).*train on its bf16 model"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"is quantised \(fp8\)"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, r"is quantised \(NVFP4\)"),
    ],
)
def test_targets_that_are_not_supported_are_refused(world, tmp_path, values, reason):
    shutil.copytree(world / "target", tmp_path / "target")
    change_config(tmp_path / "target", **values)
    with pytest.raises(UserError, match=reason):
        load_target(TargetOptions(path=str(tmp_path / "target")), CPU)


def test_a_folder_that_says_apart_from_its_config_that_it_is_quantised(world, tmp_path):
    shutil.copytree(world / "target", tmp_path / "target")
    (tmp_path / "target" / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is quantised \(modelopt\)"):
        load_target(TargetOptions(path=str(tmp_path / "target")), CPU)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin"])
def test_weights_outside_of_the_targets_folder_are_refused(world, tmp_path, name):
    target = tmp_path / "target"
    shutil.copytree(world / "target", target)
    shutil.copy(target / "model.safetensors", tmp_path / "secret.safetensors")
    (target / "model.safetensors").unlink()
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(UserError, match="is no plain file name; weights are read from their own folder only"):
        load_target(TargetOptions(path=str(target)), CPU)


def test_pickled_weights_are_not_read(world, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(world / "target", target)
    (target / "model.safetensors").unlink()
    torch.save({}, target / "pytorch_model.bin")
    with pytest.raises(UserError, match="its weights or tokenizer cannot be read"):
        load_target(TargetOptions(path=str(target)), CPU)


# Fingerprint and mask token


def test_fingerprint_depends_on_weights_and_config():
    """Tensors of fewer than 4,096 entries are read whole; larger ones are sampled, from the first entry on."""
    first = fingerprint(tiny_target())
    assert fingerprint(tiny_target()) == first
    norm, table, config = tiny_target(), tiny_target(), tiny_target()
    with torch.no_grad():
        norm.model.layers[3].input_layernorm.weight[-1] += 1e-3
        table.model.embed_tokens.weight[0, 0] += 1e-3
    config.config.rms_norm_eps = 1e-3
    assert len({first, *(fingerprint(model) for model in (norm, table, config))}) == 4


def test_fingerprint_does_not_depend_on_where_the_target_lies(world, tmp_path, monkeypatch):
    shutil.copytree(world / "target", tmp_path / "copy")
    monkeypatch.chdir(world)
    places = ["target", str(world / "target"), str(tmp_path / "copy")]
    assert len({load_target(TargetOptions(path=place), CPU).fingerprint for place in places}) == 1


@dataclass
class FullTokenizer:
    """Stands for a tokenizer that uses every row of the embedding, and has three added tokens to spare or not."""

    added_tokens_decoder: dict
    eos_token_id: int = 2
    pad_token_id: int = 0
    bos_token_id: int = 1
    unk_token_id: int | None = None
    chat_template: str = "<|im_start|>"

    def __len__(self) -> int:
        return 320


@dataclass
class Added:
    content: str


def test_mask_token_defaults_to_the_first_unused_row():
    assert choose_mask_token(tiny_tokenizer(), 320, None) == NUM_TOKENS


def test_mask_token_that_is_given_is_taken():
    assert choose_mask_token(tiny_tokenizer(), 320, 310) == 310


@pytest.mark.parametrize(("name", "number"), [("pad", 0), ("bos", 1), ("eos", 2)])
def test_mask_token_that_occurs_in_text_is_refused(name, number):
    with pytest.raises(UserError, match=f"mask_token_id {number} is the tokenizer's .* token.*leave it out"):
        choose_mask_token(tiny_tokenizer(), 320, number)


def test_without_an_unused_row_special_tokens_are_suggested():
    """Not those in use: eos, pad, bos, and what the chat template writes."""
    added = {0: Added("<pad>"), 1: Added("<s>"), 2: Added("</s>"), 3: Added("<|im_start|>"), 7: Added("<|spare|>")}
    with pytest.raises(UserError, match=r"no unused row.*\[7\]"):
        choose_mask_token(FullTokenizer(added), 320, None)
