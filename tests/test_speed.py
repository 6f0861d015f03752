"""Options of speed: what is refused and how, the compile marker, recomputation."""

from dataclasses import replace

import pytest
import torch

from draftsmith.compile import CompileMarker
from draftsmith.config import DFlashOptions, LossOptions, OptimOptions, PipelineOptions, Recipe, TargetOptions
from draftsmith.errors import UserError
from draftsmith.losses import frozen_head_loss
from draftsmith.speed import check_speed
from tests.handmade import document, pack_of, random_embedding, random_features, shape_of, tiny_drafter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def refused(recipe: Recipe, device: torch.device) -> str:
    with pytest.raises(UserError) as caught:
        check_speed(recipe, device)
    return str(caught.value)


def test_defaults_are_fine_anywhere():
    check_speed(Recipe(), CPU)
    check_speed(Recipe(), CUDA)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("target.fp8", Recipe(target=TargetOptions(fp8=True))),
        ("loss.fp8", Recipe(loss=LossOptions(fp8=True))),
        ("drafter.fp8", Recipe(drafter=DFlashOptions(fp8=True))),
    ],
)
def test_fp8_on_a_cpu_is_refused_by_name(name: str, recipe: Recipe):
    message = refused(recipe, CPU)
    assert name in message and "turn it off" in message


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("packs_per_step is 2", {"optim": OptimOptions(packs_per_step=2)}),
        ("noise is 'uniform'", {"optim": OptimOptions(noise="uniform", noise_scale=0.1)}),
        ("'muon'", {"optim": OptimOptions(kind="muon")}),
        ("'offline'", {"layout": "offline"}),
    ],
)
def test_cuda_graph_says_what_stands_against_it(part: str, changes: dict):
    recipe = Recipe(cuda_graph=True)
    check_speed(recipe, CUDA)
    assert part in refused(replace(recipe, **changes), CUDA)
    assert "no CUDA graphs" in refused(recipe, CPU)


def test_cuda_graph_is_for_one_process_and_fp8_for_whole_matrices():
    assert "2 processes" in str(pytest.raises(UserError, check_speed, Recipe(cuda_graph=True), CUDA, 2).value)
    shared = Recipe(layout="split", target=TargetOptions(fp8=True), pipeline=PipelineOptions(target_ranks=2))
    assert "pipeline.target_ranks" in refused(shared, CUDA)


def test_momentum_without_muon_is_refused():
    assert "optim.momentum" in refused(Recipe(optim=OptimOptions(momentum=0.9)), CPU)
    check_speed(Recipe(optim=OptimOptions(kind="muon", momentum=0.9)), CPU)


def test_marker_knows_what_was_compiled_and_how_long_it_took(tmp_path):
    facts = {"mode": "on", "pack": (1024, 128)}
    first = CompileMarker(facts, tmp_path)
    assert "nothing fitting" in first.expectation()
    first.before -= 61.0  # as if so many seconds had gone into compiling since
    first.record()
    assert "last time this took 61 s" in CompileMarker(facts, tmp_path).expectation()
    assert "nothing fitting" in CompileMarker(facts | {"mode": "layer"}, tmp_path).expectation()


def test_a_damaged_marker_or_an_unwritable_cache_stops_nothing(tmp_path):
    marker = CompileMarker({"a": 1}, tmp_path)
    marker.record()
    marker.path.write_text("{")
    assert "nothing fitting" in marker.expectation()
    (tmp_path / "file").write_text("")
    CompileMarker({}, tmp_path / "file").record()


@pytest.mark.parametrize("kind", ["mlp", "layer"])
def test_recomputing_gives_the_same_bits_and_keeps_less(kind: str):
    found = []
    for recompute in ("none", kind):
        drafter = tiny_drafter(block_size=4)
        for layer in drafter.layers:
            layer.recompute = recompute
        pack = pack_of([document(24)], [[0, 5, 11]], shape_of(drafter))
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        table = random_embedding(drafter)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            draft = drafter(random_features(24, drafter), pack.position, table[pack.blocks.tokens], pack.blocks)
        label, weight = pack.blocks.label[:, 1:].flatten(), pack.blocks.weight[:, 1:].flatten()
        loss = frozen_head_loss(draft.hidden.flatten(0, 1), table, label, weight, chunk=8)
        loss.total.backward()
        found.append((kept, [weight.grad for weight in drafter.parameters()]))
    assert found[1][0] < found[0][0]
    assert all(torch.equal(plain, again) for plain, again in zip(found[0][1], found[1][1], strict=True))
