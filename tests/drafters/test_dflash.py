"""The drafter: what reaches a block and what does not, the served format, and training equal to serving."""

import json

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.config import DFlashOptions
from draftsmith.drafters.attention import attend
from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter, build_config, config_json
from draftsmith.drafters.layers import drafted, rotary_tables
from draftsmith.errors import UserError
from draftsmith.types import Features
from draftsmith.visibility import dense_mask
from tests.handmade import (
    MASK,
    document,
    pack_of,
    random_embedding,
    random_features,
    shape_of,
    tiny_drafter,
)
from tests.tiny import tiny_target

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
VARIANTS = [
    {},
    {**SLIDING},
    {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3},  # smaller than the block
    {"is_causal": True},
    {**SLIDING, "is_causal": False},
]


def draft(drafter, pack, context, embedded) -> torch.Tensor:
    return drafter(Features(context=context), pack.position, embedded, pack.blocks).hidden


def scene(lengths: list[int], anchors: list[list[int]], block_size: int, **options):
    """A drafter, a pack, and random features and embedded block tokens for it."""
    drafter = tiny_drafter(block_size=block_size, **options)
    documents = [document(length, first=7 * i) for i, length in enumerate(lengths)]
    pack = pack_of(documents, anchors, shape_of(drafter))
    context = random_features(sum(lengths), drafter).context
    return drafter, pack, context, random_embedding(drafter)[pack.blocks.tokens]


CROWDED = [
    ([64], [[10, 12, 14, 30]]),  # three anchors within one block's reach
    ([30, 34], [[4, 6, 28], [0, 1, 20]]),
]


def may_reach(pack, position: int) -> list[bool]:
    """Per block: the anchor lies behind the position, in the position's document."""
    start = pack.doc_start[position]
    return [bool(pack.doc_start[a] == start and a > position) for a in pack.blocks.anchor.tolist()]


@pytest.mark.parametrize(("lengths", "anchors"), CROWDED)
def test_a_feature_changes_only_blocks_anchored_behind_it(lengths, anchors):
    """By finite difference: move one position's feature, and see which blocks move at all."""
    drafter, pack, context, embedded = scene(lengths, anchors, block_size=16)
    with torch.no_grad():
        before = draft(drafter, pack, context, embedded)
        for position in range(len(context)):
            moved = context.clone()
            moved[position] += 1
            after = draft(drafter, pack, moved, embedded)
            changed = (after != before).flatten(1).any(dim=1).tolist()
            assert changed == may_reach(pack, position), position


@pytest.mark.parametrize(("lengths", "anchors"), CROWDED)
def test_a_blocks_gradient_ends_before_its_anchor(lengths, anchors):
    """The same by autograd: exactly the positions in front of the anchor, in its document, have a gradient."""
    drafter, pack, context, embedded = scene(lengths, anchors, block_size=16)
    context.requires_grad_()
    hidden = draft(drafter, pack, context, embedded)
    reached = []
    for block in hidden:
        total = (block * torch.arange(block.numel()).view_as(block)).sum()
        (gradient,) = torch.autograd.grad(total, context, retain_graph=True)
        reached.append(gradient.ne(0).any(dim=1).tolist())
    for position in range(len(context)):
        assert [block[position] for block in reached] == may_reach(pack, position), position


@pytest.mark.parametrize("options", VARIANTS)
def test_a_block_alone_is_the_block_in_company(options):
    drafter, pack, context, embedded = scene([64], [[10, 12, 14, 30]], block_size=16, **options)
    together = draft(drafter, pack, context, embedded)
    for number, anchor in enumerate([10, 12, 14, 30]):
        single = pack_of([document(64)], [[anchor]], shape_of(drafter))
        alone = draft(drafter, single, context, embedded[number : number + 1])
        torch.testing.assert_close(alone[0], together[number], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", VARIANTS)
def test_a_block_never_sees_another_blocks_tokens(options):
    drafter, pack, context, embedded = scene([64], [[10, 12, 14, 30]], block_size=16, **options)
    before = draft(drafter, pack, context, embedded)
    for number in range(4):
        moved = embedded.clone()
        moved[number] += 1
        changed = (draft(drafter, pack, context, moved) != before).flatten(1).any(dim=1)
        assert changed.nonzero().flatten().tolist() == [number]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, [1, 2, 3]),  # a full layer sees the whole block
        ({"is_causal": True}, [2, 3]),  # slot 2 moves itself and what comes after it
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}, [2, 3]),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 9, "is_causal": False}, [1, 2, 3]),
    ],
)
def test_in_block_rule_is_the_servers(options, seen):
    drafter, pack, context, embedded = scene([20], [[10]], block_size=4, **options)
    moved = embedded.clone()
    moved[0, 2] += 1
    changed = draft(drafter, pack, context, moved) != draft(drafter, pack, context, embedded)
    assert (changed[0].any(dim=-1).nonzero().flatten() + 1).tolist() == seen


@pytest.mark.parametrize("anchor", [1, 4, 12, 19])
@pytest.mark.parametrize("options", VARIANTS)
def test_serving_a_block_equals_training_on_it(options, anchor):
    """`propose` has the context's keys and values in a cache; `forward` has the whole document beside other blocks."""
    drafter, pack, context, embedded = scene([5, 20], [[2], [1, 4, 12, 19]], block_size=8, **options)
    trained = draft(drafter, pack, context, embedded)[pack.blocks.anchor.tolist().index(5 + anchor)]
    cached = drafter.project(context[5 : 5 + anchor], torch.arange(anchor))
    served = drafter.propose(cached, embedded[pack.blocks.anchor == 5 + anchor][0])
    torch.testing.assert_close(served, trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", VARIANTS)
def test_rows_of_a_static_cache_equal_one_block_at_a_time(options):
    drafter, _, context, embedded = scene([40], [[1, 12, 39]], block_size=8, **options)
    start, width = np.array([1, 12, 39]), 48
    cache = [(torch.randn(3, width, *key.shape[1:]), torch.randn(3, width, *key.shape[1:])) for key, _ in
             drafter.project(context, torch.arange(40))]  # fmt: skip
    alone = []
    for row, length in enumerate(start.tolist()):
        cached = drafter.project(context[:length], torch.arange(length))
        for (keys, values), (key, value) in zip(cache, cached, strict=True):
            keys[row, :length], values[row, :length] = key, value
        alone.append(drafter.propose(cached, embedded[row]))
    place = torch.from_numpy(start)[:, None] + torch.arange(8)
    rows = drafter.propose_rows(cache, embedded[:3], place, drafter.row_masks(start, width))
    torch.testing.assert_close(rows, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_served_context_may_arrive_in_pieces():
    drafter, _, context, _ = scene([20], [[5]], block_size=4)
    whole = drafter.project(context, torch.arange(20))
    pieces = [drafter.project(context[:7], torch.arange(7)), drafter.project(context[7:], torch.arange(7, 20))]
    for layer, (key, value) in enumerate(whole):
        torch.testing.assert_close(torch.cat([p[layer][0] for p in pieces]), key)
        torch.testing.assert_close(torch.cat([p[layer][1] for p in pieces]), value)


# The served format


def test_tensors_are_exactly_the_served_ones():
    """Names and shapes of z-lab's checkpoints: 11 per layer, and fc, hidden_norm, norm."""
    drafter = tiny_drafter(num_layers=3, layer_ids=(0, 1, 2), num_heads=4, num_kv_heads=2, head_dim=16)
    hidden, ffn, heads, kv_heads, dim = 32, 64, 4, 2, 16
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    expected = {"fc.weight": (hidden, 3 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    expected |= {f"layers.{i}.{name}.weight": shape for i in range(3) for name, shape in layer.items()}
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected


def served_config(**options) -> dict:
    return json.loads(config_json(tiny_drafter(**options).config))


def test_config_has_the_keys_that_servers_read():
    config = served_config(block_size=8)
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        "num_target_layers": 4,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    assert {key: config.get(key, "missing") for key in expected} == expected


def test_config_spells_rope_both_ways():
    config, target = served_config(), tiny_target("qwen3").config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == target.rope_parameters["rope_theta"]
    assert config["rope_parameters"]["rope_type"] == "default"


def test_config_never_says_is_causal_null():
    assert "is_causal" not in served_config()
    assert served_config(is_causal=False)["is_causal"] is False
    assert served_config(is_causal=True)["is_causal"] is True


def test_config_keeps_the_window_of_sliding_layers():
    config = served_config(**SLIDING)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (6, True)


def test_partial_rotation_of_the_target_is_not_copied():
    """The drafter rotates whole heads; a server that read a quarter from its config would rotate a quarter."""
    target = tiny_target("qwen3").config
    target.rope_parameters = target.rope_parameters | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    config = build_config(DFlashOptions(num_layers=1, mask_token_id=MASK), target, (1,))
    written = config_json(config)
    assert "partial_rotary_factor" not in written
    assert "mrope_section" not in written
    plain = DFlashDrafter(build_config(DFlashOptions(num_layers=1, mask_token_id=MASK), tiny_target().config, (1,)))
    assert torch.equal(DFlashDrafter(config).rotary.frequencies, plain.rotary.frequencies)
    assert len(plain.rotary.frequencies) == config.head_dim // 2


@pytest.mark.parametrize("options", VARIANTS)
def test_drafter_from_its_files_is_the_same_drafter(options):
    drafter, pack, context, embedded = scene([30], [[3, 9]], block_size=8, **options)
    text = config_json(drafter.config)
    again = DFlashDrafter.from_files(text, {name: t.clone() for name, t in drafter.state_dict().items()})
    assert torch.equal(draft(again, pack, context, embedded), draft(drafter, pack, context, embedded))
    assert config_json(again.config) == text


def test_missing_or_unknown_tensors_are_an_error_that_names_them():
    drafter = tiny_drafter()
    weights = dict(drafter.state_dict())
    weights["norm.wait"] = weights.pop("norm.weight")
    with pytest.raises(RuntimeError, match=r"(?s)norm\.weight.*norm\.wait"):
        DFlashDrafter.from_files(config_json(drafter.config), weights)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layer_types": ("full_attention",)}, "layer_types names 1 layers, drafter.num_layers is 2"),
        ({"sliding_window": 8}, "sliding_window has no effect"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window must be at least 1"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of drafter.num_kv_heads 2"),
        ({"block_size": 1}, "block_size is 1"),
        ({"mask_token_id": 320}, "mask_token_id 320 has no row"),
        ({"mask_token_id": -1}, "mask_token_id -1 has no row"),
    ],
)
def test_wrong_options_are_refused(options, reason):
    chosen = DFlashOptions(**{"num_layers": 2, "block_size": 8, "mask_token_id": MASK} | options)
    with pytest.raises(UserError, match=reason):
        build_config(chosen, tiny_target("qwen3").config, (0, 2))


# Numbers


def test_rotary_tables_stay_fp32_and_right_far_out():
    """At position 3,000 a bf16 table would be radians off; the float64 angle is the judge."""
    drafter = tiny_drafter(head_dim=16).to(torch.bfloat16)
    cos, sin = drafter.rotary(torch.tensor([3000]))
    theta = drafter.config.rope_parameters["rope_theta"]
    angle = 3000 * theta ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0].double(), angle.cos().repeat(2), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[0].double(), angle.sin().repeat(2), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
)
def test_rotary_tables_are_transformers_own(rope):
    """A server reads `rope_parameters` from our config.json and builds its tables from them."""
    target = tiny_target("qwen3").config
    target.rope_parameters = rope
    drafter = DFlashDrafter(build_config(DFlashOptions(num_layers=1, mask_token_id=MASK), target, (1,)))
    written = DFlashConfig.from_dict(json.loads(config_json(drafter.config)))
    position = torch.arange(0, 2000, 37)
    expected = Qwen3RotaryEmbedding(written)(torch.zeros(1), position[None])
    for ours, theirs in zip(drafter.rotary(position), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0])


def test_key_heads_serve_query_heads_in_order():
    """Query head h reads key head h // (heads / kv heads), as in the target's family."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, 6, 8, generator=generator)
    key, value = (torch.randn(9, 2, 8, generator=generator) for _ in range(2))
    mask = torch.rand(5, 9, generator=generator) < 0.5
    mask[:, 0] = True
    out = attend(query, key, value, mask)
    for slot in range(5):
        for head in range(6):
            seen = mask[slot].nonzero().flatten()
            scores = key[seen, head // 3] @ query[slot, head] / 8**0.5
            expected = scores.softmax(0) @ value[seen, head // 3]
            torch.testing.assert_close(out[slot, head], expected)


def test_bfloat16_drafter_stays_bfloat16():
    """No fp32 table or mask lifts the states to fp32 on the way."""
    drafter, pack, context, embedded = scene([20], [[5, 9]], block_size=4)
    exact = draft(drafter, pack, context, embedded)
    half = draft(drafter.to(torch.bfloat16), pack, context.bfloat16(), embedded.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() < 0.05 * exact.norm()


def test_rotary_tables_are_a_well_made_operation():
    """What torch.compile is told of it (schema, shapes, types) is true."""
    torch.library.opcheck(rotary_tables, (torch.tensor([0, 1, 7, 40_000]), torch.rand(8), 1.5))


@pytest.mark.parametrize("block_size", [2, 5])
def test_the_last_layer_makes_what_it_made_with_slot_0(block_size):
    """Leaving slot 0 out after attention changes nothing for the other slots, nor any gradient."""
    drafter, pack, context, embedded = scene([40], [[3, 9, 30]], block_size=block_size)
    found = []
    for slots in (block_size, 0):
        drafter.zero_grad()
        masks = {"full_attention": dense_mask(pack.blocks.full, 40)}
        projected = drafter.project(context, pack.position)
        out = drafter._decode(embedded.flatten(0, 1), pack.blocks.position.flatten(), projected, masks, slots)
        out = out if slots else drafted(out, block_size)
        (out**2).sum().backward()
        found.append([out, *(weight.grad for weight in drafter.parameters())])
    for short, whole in zip(*found, strict=True):
        torch.testing.assert_close(short, whole, rtol=1e-4, atol=1e-5)
