"""Exports: the keys and tensors that each loader reads, written whole or not at all, and the way back."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from draftsmith.cli import main
from draftsmith.commands import ExportCommand
from draftsmith.config import Recipe
from draftsmith.drafters.dflash import DFlashConfig
from draftsmith.errors import DataError, EnvironmentFault, UserError
from draftsmith.export import EXPORTS, folder
from draftsmith.export.card import fenced, plain, write_card
from draftsmith.export.publish import _hub_sets, describe
from draftsmith.export.serve import serve_commands, sglang_objections
from draftsmith.export.speculators import speculators_config
from draftsmith.export.zlab import zlab_config
from draftsmith.findings import CheckFailed
from draftsmith.run import find_checkpoint
from draftsmith.targets import HFTarget
from draftsmith.telemetry import Console
from draftsmith.train import train
from draftsmith.verbs import finish, recorded_prompts
from tests.conftest import make_recipe, with_options
from tests.handmade import tiny_drafter
from tests.test_run import contents
from tests.tiny import tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def run(world, tmp_path_factory) -> Recipe:
    """A finished run of a few steps."""
    recipe = make_recipe(world, tmp_path_factory.mktemp("run"))
    recipe = with_options(with_options(recipe, "optim", steps=4), "evaluation", every=4)
    train(recipe, Console(io.StringIO()))
    return recipe


@pytest.fixture
def exported(run, tmp_path, capsys) -> Path:
    main(["export", run.run, "--to", "all", "--output", str(tmp_path / "out")])
    return tmp_path / "out"


# What each loader reads


def test_zlab_config_writes_every_key_that_somebody_would_default(exported):
    config = json.loads((exported / "zlab" / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 4,
        "vocab_size": 320,
        "hidden_size": 32,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": False,
        "sliding_window": None,
        "is_causal": False,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["dflash_config"] == {
        "block_size": 4,
        "mask_token_id": 259,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
    }
    assert "auto_map" not in config


def test_speculators_config_counts_hidden_states_and_names_the_target(exported, run):
    config = json.loads((exported / "speculators" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3], "block ids plus one"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(Path(run.target.path).resolve())
    assert config["sliding_window_non_causal"] is True, "false makes full layers causal in vLLM 0.32"
    assert config["transformer_layer_config"]["rope_theta"] == 10000.0


def test_tensors_are_bf16_without_a_prefix(exported, run):
    zlab = load_file(exported / "zlab" / "model.safetensors")
    assert len(zlab) == 11 * 2 + 3 and {v.dtype for v in zlab.values()} == {torch.bfloat16}
    assert zlab["fc.weight"].shape == (32, 64) and "layers.1.self_attn.q_norm.weight" in zlab
    both = load_file(exported / "speculators" / "model.safetensors")
    assert both.keys() - zlab.keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(both[name], value) for name, value in zlab.items())
    target = load_file(Path(run.target.path) / "model.safetensors")
    assert torch.equal(both["embed_tokens.weight"], target["model.embed_tokens.weight"].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({}, False),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 4}, True),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 4, "is_causal": False}, False),
        ({"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}, None),
        ({"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4, "is_causal": False}, False),
    ],
)
def test_the_in_block_rule_survives(options, causal):
    config = tiny_drafter(**options).config
    written = zlab_config(config)
    assert written.get("is_causal") == causal
    again = DFlashConfig.from_dict(written)
    assert [again.causal(kind) for kind in again.kinds] == [config.causal(kind) for kind in config.kinds]
    assert again.sliding_window == config.sliding_window


def test_speculators_refuses_what_one_flag_cannot_say():
    mixed = tiny_drafter(layer_types=("sliding_attention", "full_attention"), sliding_window=4).config
    with pytest.raises(UserError, match="vllm#56692"):
        speculators_config(mixed, "target", [])
    assert speculators_config(tiny_drafter().config, "target", [])["sliding_window_non_causal"] is True
    sliding = tiny_drafter(layer_types=("sliding_attention",) * 2, sliding_window=4).config
    assert speculators_config(sliding, "target", [])["sliding_window_non_causal"] is False


def test_scaled_rope_is_written_in_both_spellings():
    config = tiny_drafter().config
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    written = zlab_config(config)
    assert written["rope_theta"] == 1e6 and written["rope_parameters"]["factor"] == 4.0
    assert written["rope_scaling"]["rope_type"] == "yarn"
    again = DFlashConfig.from_dict(written).rope_parameters
    assert again["rope_theta"] == 1e6 and again["factor"] == 4.0 and again["rope_type"] == "yarn"


def test_our_reading_of_sglang_accepts_the_export_and_names_faults(exported):
    config = json.loads((exported / "zlab" / "config.json").read_text())
    assert sglang_objections(config, 320, 4) == []
    broken = {**config, "dflash_config": {"mask_token_id": 320}, "hidden_act": "gelu", "block_size": None}
    said = " ".join(sglang_objections(broken, 320, 4))
    assert all(word in said for word in ("target_layer_ids is absent", "mask_token_id 320", "block_size", "gelu"))
    assert "outside" in sglang_objections({**config, "dflash_config": {"target_layer_ids": [9]}}, 320, 4)[0]


# The folder


def test_the_record_holds_hashes_provenance_and_measurements(exported, run):
    record = json.loads((exported / "zlab" / "draftsmith.json").read_text())
    assert {"config.json", "model.safetensors", "README.md"} == set(record["files"])
    assert record["files"]["config.json"] == folder.measure(exported / "zlab" / "config.json")
    assert record["fingerprints"].keys() == {"data", "target", "tokenizer"}
    assert record["trained"]["block_size"] == 4 and math.isfinite(record["trained"]["accept"])
    assert record["evaluation"]["prompts"] == 2
    assert [len(a["tokens"]) for a in record["measured"]["answers"]] == [12] * 4
    text = json.dumps(record)
    assert str(Path(run.run).parent) not in text and str(Path(run.target.path).parent) not in text


def test_export_says_how_to_serve_and_what_is_next(run, tmp_path, capsys):
    out = tmp_path / "out"
    main(["export", run.run, "--output", str(out)])
    said = capsys.readouterr().out
    assert f"vllm serve {run.target.path} --speculative-config" in said and '"num_speculative_tokens": 3' in said
    assert "--speculative-num-draft-tokens 4" in said
    assert said.strip().splitlines()[-1] == f"next: draftsmith verify {out} --target.path {run.target.path}"


def test_export_again_replaces_an_export_and_nothing_else(run, tmp_path, capsys):
    out = tmp_path / "out"
    main(["export", run.run, "--output", str(out)])
    before = contents(out)
    main(["export", run.run, "--output", str(out)])
    assert contents(out) == before and [p.name for p in tmp_path.iterdir()] == ["out"]
    (out / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", run.run, "--output", str(out)])
    assert ended.value.code == 2 and "it holds notes.txt" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", ["model", "file", "link"])
def test_a_folder_that_is_not_ours_is_never_overwritten(run, tmp_path, capsys, make):
    out = tmp_path / "out"
    if make == "file":
        out.write_text("mine")
    elif make == "link":
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    else:
        out.mkdir()
        (out / "config.json").write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", run.run, "--output", str(out)])
    assert ended.value.code == 2 and "choose another --output" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_failing_disk_leaves_the_earlier_export(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    main(["export", run.run, "--output", str(out)])
    before = contents(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "save_file", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        folder.write_folder(out, {}, {}, "", {})
    assert contents(tmp_path) == before


def test_all_layouts_are_checked_before_the_first_is_written(run, tmp_path, capsys):
    (tmp_path / "out" / "speculators").mkdir(parents=True)
    (tmp_path / "out" / "speculators" / "x").write_text("mine")
    with pytest.raises(SystemExit):
        main(["export", run.run, "--to", "all", "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out" / "zlab").exists()


def test_prompts_that_cannot_be_read_are_an_error(run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run.run, copy)
    recipe = copy / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("prompts.jsonl", "gone.jsonl"))
    with pytest.raises(SystemExit) as ended:
        main(["export", str(copy), "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert ended.value.code == 4 and "gone.jsonl: no such file" in error and "--recorded_prompts 0" in error
    assert not (tmp_path / "out").exists()
    main(["export", str(copy), "--output", str(tmp_path / "out"), "--recorded_prompts", "0"])
    assert "the drafter on random text (as asked)" in capsys.readouterr().out


def test_export_says_which_prompts_it_recorded(run, tmp_path, capsys):
    main(["export", run.run, "--output", str(tmp_path / "out")])
    assert f"the drafter on 4 prompts of {run.evaluation.prompts}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "said"),
    [
        (4, "draftsmith: FAIL tensors", CheckFailed, "its export is not as trained: FAIL tensors"),
        (
            3,
            "draftsmith: no memory",
            EnvironmentFault,
            "could not be verified: no memory. Try again with: draftsmith v",
        ),
        (1, "Traceback\nImportError: x", EnvironmentFault, "could not be verified: ImportError: x"),
        (-9, "", EnvironmentFault, "could not be verified: verify ended with -9"),
    ],
)
def test_only_a_failed_check_says_that_the_export_is_not_as_trained(run, monkeypatch, code, stderr, kind, said):
    def ended(words, **more):
        return subprocess.CompletedProcess(words, code, stdout="", stderr=stderr)

    monkeypatch.setattr("draftsmith.verbs.subprocess.run", ended)
    with pytest.raises(kind, match=re.escape(said)) as raised:
        finish(replace(run, at_end="verify"), Console(io.StringIO()))
    assert raised.value.exit_code == (4 if code == 4 else 3) and type(raised.value) is kind


def test_held_out_prompts_stay_private_if_asked(run, tmp_path, capsys):
    main(["export", run.run, "--output", str(tmp_path / "out"), "--recorded_prompts", "0"])
    record = json.loads((tmp_path / "out" / "draftsmith.json").read_text())
    assert [len(a["prompt"]) for a in record["measured"]["answers"]] == [16, 16]


def test_prompts_are_recorded_from_wherever_they_are(run, capsys):
    target = HFTarget(tiny_target(), tiny_tokenizer(), (0, 2))
    command, console = ExportCommand(run=run.run), Console()
    local = recorded_prompts(run, target, command, console)
    fsspec.filesystem("memory").pipe("/held/out.jsonl", Path(run.evaluation.prompts).read_bytes())
    there = with_options(run, "evaluation", prompts="memory://held/out.jsonl")
    assert [p.tolist() for p in recorded_prompts(there, target, command, console)] == [p.tolist() for p in local]
    assert "prompts of memory://held/out.jsonl, as token ids" in capsys.readouterr().out
    gone = with_options(run, "evaluation", prompts="memory://held/nowhere.jsonl")
    with pytest.raises(DataError, match=r"cannot be read: memory://held/nowhere.jsonl: no such file \(to record"):
        recorded_prompts(gone, target, command, console)


# The card


def test_card_begins_with_commands_and_has_no_pipeline(exported):
    for layout, library in (("zlab", "draftsmith"), ("speculators", "speculators")):
        card = (exported / layout / "README.md").read_text()
        assert f"library_name: {library}" in card and "pipeline_tag" not in card
        assert "base_model" not in card, "a local folder is no Hub id"
        assert card.split("```")[1].startswith("bash\nvllm serve ")
        assert "| 2 |" in card


def test_what_comes_from_outside_cannot_leave_its_place():
    assert plain("a|b\n<script>`x`\x1b[0m") == "a\\|b\\<script\\>\\`x\\`\\[0m"
    assert fenced("```\n# owned") == "````\n```\n# owned\n````"
    config = zlab_config(tiny_drafter().config)
    pinned = serve_commands(zlab_config(tiny_drafter().config), "d", "org/t", "v 1")
    assert all("org/t --revision 'v 1' --" in line for line in pinned.values())
    assert "--tokenizer-revision 'v 1' --spec" in next(iter(pinned.values())), "vLLM pins the two one by one"
    line = next(iter(serve_commands(config, "a b'; rm -rf x", "t").values()))
    assert "revision" not in line
    assert json.loads(shlex.split(line)[-1])["model"] == "a b'; rm -rf x", "one word for the shell"


RECORD = {
    "layout": "zlab",
    "target": {"name": "org/model", "hub": True, "revision": "abc123"},
    "license": "apache-2.0",
    "datasets": ["org/chats", 'an"other/set'],
    "evaluation": {"accept_length": 2.5, "accept_length_pooled": 2.4, "prompts": 12},
    "measured": {"accept_length_pooled": 2.3, "answers": [{}] * 4},
    "fingerprints": {"target": "t", "data": "d"},
    "checkpoint": "step-00000600",
    "step": 600,
    "versions": {"draftsmith": "0"},
}


def parsed(tmp_path: Path, **changes) -> ModelCard:
    """The card as the Hub's own library reads it."""
    (tmp_path / "README.md").write_text(write_card(zlab_config(tiny_drafter().config), RECORD | changes))
    return ModelCard.load(tmp_path / "README.md")


def test_the_hub_reads_the_cards_metadata(tmp_path):
    card = parsed(tmp_path)
    data = card.data.to_dict()
    assert data["base_model"] == "org/model" and "org/model, revision abc123" in card.text
    assert data["datasets"] == ["org/chats", 'an"other/set'] and "org/chats, an" in card.text
    assert data["license"] == "apache-2.0" and data["library_name"] == "draftsmith" and "pipeline_tag" not in data
    assert {"dflash", "speculative-decoding", "draft-model"} <= set(data["tags"])
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accept_length", 2.5) and "12 prompts" in result.metric_name


def test_the_card_names_nothing_that_is_not_on_the_hub(tmp_path):
    private = {"name": "my-model", "hub": False, "revision": None}
    card = parsed(tmp_path, target=private, license="", datasets=[], evaluation=None, layout="speculators")
    assert card.data.to_dict().keys() == {"library_name", "tags"} and card.data.library_name == "speculators"
    assert "data sets" not in card.text


def test_sets_of_the_hub_reach_the_record(world, run, tmp_path):
    prepared = shutil.copytree(world / "prepared", tmp_path / "prepared")
    assert "hub_sets" in json.loads((prepared / "manifest.json").read_text())
    recipe = with_options(run, "data", prepared=str(prepared))
    assert _hub_sets(recipe) == [], "conversations.jsonl is a file"
    manifest = json.loads((prepared / "manifest.json").read_text()) | {"hub_sets": ["org/chats"]}
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    assert _hub_sets(recipe) == ["org/chats"]
    mix = with_options(run, "data", prepared="", mix=(f"{prepared}=2", run.data.prepared))
    assert _hub_sets(mix) == ["org/chats"]
    (prepared / "manifest.json").write_text("{}")
    assert _hub_sets(recipe) == [] == _hub_sets(with_options(run, "data", prepared=str(tmp_path / "gone")))


# And every layout


def test_layouts_agree_about_a_tied_target():
    model = tiny_target("qwen3", tied=True)
    drafter = tiny_drafter()
    target = HFTarget(model, tiny_tokenizer(), (0, 2))
    for layout in EXPORTS.values():
        _, tensors = layout(drafter, target, "t")
        assert torch.equal(tensors["fc.weight"], drafter.fc.weight.to(torch.bfloat16))


def test_no_folder_of_this_machine_is_published(run):
    mixed = with_options(run, "data", prepared="/home/me/set", mix=("/home/me/words=0.5", "sums"))
    record = describe(mixed, find_checkpoint(Path(run.run), "last", print), tiny_drafter(), "")
    assert record["recipe"]["data.mix"] == ["words=0.5", "sums"] and record["recipe"]["data.prepared"] == "set"
    assert "/home/me" not in json.dumps(record)
