"""The command line: quick help, one clear message for each mistake, nothing half-written, and the next command."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from draftsmith.cli import VERBS, main
from draftsmith.config import Recipe, flatten, to_toml
from draftsmith.ranges import PLACES, RULES, _named
from draftsmith.recipe import bundled_recipes, read_recipe
from tests.conftest import with_options
from tests.test_run import contents


def write(recipe: Recipe, folder: Path) -> str:
    file = folder / "my.toml"
    file.write_text(to_toml(recipe))
    return str(file)


class Mistakes:
    """Runs a command that must fail, and checks what every failure has in common."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *words: str, code: int = 2) -> str:
        before = contents(self.folder)
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        said = self.capsys.readouterr().err
        assert ended.value.code == code, said
        assert "Traceback" not in said
        assert contents(self.folder) == before, "a mistake leaves everything as it was"
        return said

    def one_line(self, *words: str, code: int = 2) -> str:
        """For mistakes that draftsmith itself reports; tyro draws a box."""
        said = self(*words, code=code)
        (line,) = [line for line in said.splitlines() if line.startswith("draftsmith:")]
        return line


@pytest.fixture
def mistake(tmp_path, capsys) -> Mistakes:
    return Mistakes(tmp_path, capsys)


# Help


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]])
def test_help_is_instant_and_needs_no_torch(words):
    code = "import sys; from draftsmith.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    assert "draftsmith" in ended.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_the_overview_names_every_verb(capsys):
    main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {verb} " in said for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: draftsmith {verb}" in capsys.readouterr().out


# Mistakes in words and files


def test_unknown_verb(mistake):
    assert "unknown verb 'trian'; one of: demo" in mistake.one_line("trian")


def test_too_many_words(mistake):
    assert "unexpected 'b.toml'" in mistake.one_line("train", "a.toml", "b.toml")


def test_misspelt_flag_gets_a_suggestion(mistake):
    said = mistake("train", "--optim.lrr", "3")
    assert "Unrecognized options: --optim.lrr" in said and "--optim.lr" in said.split("Perhaps you meant")[1]


@pytest.mark.parametrize("verb", ["train", "prepare", "preview", "regenerate"])
def test_misspelt_key_in_a_recipe_names_the_recipe(mistake, tmp_path, verb):
    file = tmp_path / "typo.toml"
    file.write_text("[optim]\nlrr = 3\n")
    said = mistake(verb, file)
    assert "Unrecognized options: --optim.lrr" in said and "--optim.lr" in said.split("Perhaps you meant")[1]
    assert str(file) in said


def test_misspelt_table(mistake, tmp_path):
    file = tmp_path / "typo.toml"
    file.write_text("[optimizer]\nlr = 3\n")
    said = mistake("train", file)
    assert "--optimizer.lr" in said and str(file) in said


def test_wrong_type(mistake, tmp_path):
    assert "--optim.lr" in mistake("train", "--optim.lr", "fast")
    file = tmp_path / "type.toml"
    file.write_text('[optim]\nsteps = "many"\n')
    said = mistake("train", file)
    assert "--optim.steps" in said and str(file) in said


def test_value_outside_the_choices(mistake):
    assert "colocated" in mistake("train", "--layout", "nearby")


def test_missing_recipe_lists_the_bundled_ones(mistake):
    assert "no such file, and no bundled recipe; bundled: llama-3.1-8b, qwen3-8b" in mistake.one_line(
        "train", "nowhere.toml"
    )


def test_toml_syntax_error(mistake, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("[optim\nlr = 3\n")
    said = mistake.one_line("train", file)
    assert f"recipe {file} is not valid TOML" in said and "line 1" in said


def test_binary_recipe(mistake, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not valid TOML" in mistake.one_line("train", file)


# Mistakes about data and target


def test_no_prepared_folder_given(mistake, recipe, tmp_path):
    file = write(with_options(recipe, "data", prepared=""), tmp_path)
    assert "data.prepared is not given" in mistake.one_line("train", file)


def test_missing_prepared_folder(mistake, recipe, tmp_path):
    file = write(with_options(recipe, "data", prepared=str(tmp_path / "nowhere")), tmp_path)
    said = mistake.one_line("train", file, code=4)
    assert "holds no prepared conversations; run `draftsmith prepare`" in said


def test_a_document_longer_than_a_pack(mistake, recipe, tmp_path):
    file = write(with_options(recipe, "pack", tokens=48), tmp_path)
    said = mistake.one_line("train", file, code=4)
    assert "samples are longer than pack.tokens 48" in said and "set data.overlong to 'cut'" in said


def test_cut_documents_are_counted(recipe, tmp_path, capsys):
    recipe = with_options(with_options(recipe, "pack", tokens=48), "data", overlong="cut")
    recipe = with_options(with_options(recipe, "evaluation", prompts=""), "optim", steps=1)
    main(["train", write(recipe, tmp_path)])
    assert "samples are cut to pack.tokens = 48" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "changes", "said"),
    [
        ("drafter", {"mask_token_id": 2}, "drafter.mask_token_id 2 is the tokenizer's eos token"),
        ("drafter", {"mask_token_id": 0}, "drafter.mask_token_id 0 is the tokenizer's pad token"),
        ("drafter", {"mask_token_id": 320}, "drafter.mask_token_id 320 has no row in the target's embedding"),
        ("drafter", {"mask_token_id": -5}, "drafter.mask_token_id -5 has no row"),
        ("drafter", {"block_size": 161}, "drafter.block_size 161 is larger than pack.tokens 160"),
        ("drafter", {"block_size": 1}, "drafter.block_size is 1"),
        ("drafter", {"sliding_window": 8}, "drafter.sliding_window has no effect"),
        ("drafter", {"layer_types": ("sliding_attention", "full_attention")}, "drafter.sliding_window must be"),
        ("drafter", {"layer_types": ("full_attention",)}, "drafter.layer_types names 1 layers"),
        ("drafter", {"num_heads": 3}, "not a multiple"),
        ("target", {"layer_ids": (0, 3)}, "the last block cannot be tapped"),
        ("target", {"layer_ids": (0, 9)}, "give distinct 0-based blocks from 0 to 2"),
        ("optim", {"steps": 0}, "optim.steps is 0"),
        ("optim", {"packs_per_step": 0}, "optim.packs_per_step is 0"),
        ("optim", {"noise": "uniform"}, "give both or neither"),
        ("checkpoint", {"keep": 1}, "checkpoint.keep is 1; at least 2"),
        ("pack", {"anchors": 2}, "pack.anchors is 2; raise pack.anchors"),
        ("loss", {"gamma": -1.0}, "loss.gamma is -1.0"),
        ("evaluation", {"temperature": -1.0}, "evaluation.temperature is -1.0; it must be 0 or more"),
        ("evaluation", {"top_p": 0.0}, "evaluation.top_p is 0.0; it must be greater than 0 and at most 1"),
        ("evaluation", {"top_k": -1}, "evaluation.top_k is -1"),
        ("evaluation", {"at_start": True, "prompts": ""}, "evaluation.at_start has no effect without"),
        ("optim", {"warmup": 5.0}, "optim.warmup is 5.0; it must be from 0 to 1"),
        ("optim", {"min_lr": -0.1}, "optim.min_lr is -0.1"),
        ("optim", {"betas": (0.9, 1.5)}, "optim.betas is 1.5; it must be at least 0 and less than 1"),
        ("optim", {"weight_decay": -0.1}, "optim.weight_decay is -0.1"),
        ("optim", {"noise": "uniform", "noise_scale": -0.1}, "optim.noise_scale is -0.1"),
        ("optim", {"eps": 0.0}, "optim.eps is 0.0"),
        ("data", {"workers": -1}, "data.workers is -1"),
    ],
)
def test_options_that_cannot_work(mistake, recipe, tmp_path, table, changes, said):
    assert said in mistake.one_line("train", write(with_options(recipe, table, **changes), tmp_path))
    assert not Path(recipe.run).exists()


@pytest.mark.parametrize("name", ["run", "init"])
def test_a_url_is_no_place_of_a_run(mistake, recipe, tmp_path, name):
    said = mistake.one_line("train", write(recipe, tmp_path), f"--{name}", "s3://bucket/run")
    assert f"{name} is 's3://bucket/run', a URL; it must be a place on this machine" in said
    assert not Path("s3:").exists()


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_a_url_is_no_place_for_output(mistake, recipe, verb):
    assert "output is 'gs://b/o', a URL" in mistake.one_line(verb, recipe.run, "--output", "gs://b/o")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "RUN", "hi", "--temperature", "-1"], "temperature is -1.0; it must be 0 or more"),
        (["generate", "RUN", "hi", "--top_p", "0"], "top_p is 0.0; it must be greater than 0 and at most 1"),
        (["generate", "RUN", "hi", "--top_k", "-2"], "top_k is -2"),
        (["generate", "RUN", "hi", "--temperature", "nan"], "temperature is nan; it must be 0 or more"),
        (["generate", "RUN", "hi", "--max_new_tokens", "0"], "max_new_tokens is 0; it must be greater than 0"),
        (["evaluate", "RUN", "--evaluation.temperature", "-1"], "evaluation.temperature is -1.0"),
        (["evaluate", "RUN", "--evaluation.top_p", "1.5"], "evaluation.top_p is 1.5"),
        (["export", "RUN", "--recorded_prompts", "-1"], "recorded_prompts is -1; it must be 0 or more"),
    ],
)
def test_numbers_out_of_range(mistake, recipe, words, said):
    assert said in mistake.one_line(*[recipe.run if word == "RUN" else word for word in words])


def test_every_range_is_that_of_an_option():
    known = {name for name, _ in _named(Recipe())} | {
        name for options, _, _ in VERBS.values() for name in options.__dataclass_fields__
    }
    assert {name for _, names in RULES.values() for name in names.split()} | set(PLACES) <= known


def test_missing_target_folder(mistake, recipe, tmp_path):
    file = write(with_options(recipe, "target", path=str(tmp_path / "nowhere")), tmp_path)
    assert "target.path" in (said := mistake.one_line("train", file)) and "nowhere" in said


def test_no_target_given(mistake, recipe, tmp_path):
    file = write(with_options(recipe, "target", path=""), tmp_path)
    assert "target.path is not given" in mistake.one_line("train", file)


def test_target_folder_without_a_config(mistake, recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    file = write(with_options(recipe, "target", path=str(tmp_path / "empty")), tmp_path)
    assert "has no config.json" in mistake.one_line("train", file)


def test_target_of_an_unsupported_family(mistake, recipe, world, tmp_path):
    shutil.copytree(world / "target", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    file = write(with_options(recipe, "target", path=str(tmp_path / "other")), tmp_path)
    assert "is of family 'gpt2'; supported: llama, qwen2, qwen3" in mistake.one_line("train", file)


def test_target_of_another_tokenizer_than_the_data(mistake, recipe, world, tmp_path):
    shutil.copytree(world / "target", tmp_path / "other")
    template = tmp_path / "other" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "Assistant"))
    file = write(with_options(recipe, "target", path=str(tmp_path / "other")), tmp_path)
    assert "was made with another tokenizer or chat template" in mistake.one_line("train", file)


def test_missing_evaluation_prompts(mistake, recipe, tmp_path):
    file = write(with_options(recipe, "evaluation", prompts=str(tmp_path / "none.jsonl")), tmp_path)
    assert "none.jsonl: no such file" in mistake.one_line("train", file, code=4)


# Mistakes about the run folder


def test_run_folder_of_another_recipe(mistake, recipe, tmp_path):
    recipe = with_options(with_options(recipe, "evaluation", prompts=""), "optim", steps=2)
    main(["train", write(recipe, tmp_path)])
    said = mistake.one_line("train", tmp_path / "my.toml", "--optim.lr", "0.5")
    assert "belongs to another recipe (optim.lr: 0.003 there, 0.5 here)" in said


def test_run_folder_that_is_none(mistake, recipe, tmp_path):
    Path(recipe.run).mkdir()
    (Path(recipe.run) / "thesis.txt").write_text("years of work")
    assert "is not empty and holds no recipe.toml" in mistake.one_line("train", write(recipe, tmp_path))


@pytest.mark.parametrize("words", [["evaluate"], ["generate"]])
def test_no_run_given(mistake, words):
    assert "run" in mistake(*words)


@pytest.mark.parametrize("words", [["evaluate", "RUN"], ["generate", "RUN", "hello"]])
def test_a_folder_that_is_no_run(mistake, tmp_path, words):
    words = [str(tmp_path) if word == "RUN" else word for word in words]
    assert "is no run folder (it holds no recipe.toml)" in mistake.one_line(*words)


# Recipes


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipes_parse(name):
    assert isinstance(read_recipe(name), Recipe)


@pytest.mark.parametrize("name", sorted(bundled_recipes().keys() - {"smollm2-demo"}))
def test_recipes_for_real_targets_hang_together(name):
    """Each verb reads what the verb before wrote, and nothing is left over from a demo."""
    recipe = read_recipe(name)
    assert recipe.data.conversations == recipe.regenerate.output
    assert recipe.evaluation.prompts == f"{recipe.data.prepared}/held_out.jsonl" and recipe.data.held_out > 0
    own, default = flatten(asdict(recipe)), flatten(asdict(Recipe()))
    free = ("device", "layout", "target.layer_ids", "drafter.", "optim.", "loss.", "data.overlap")
    assert [key for key in own if key.startswith(free) and own[key] != default[key]] == []
    asked = json.loads(recipe.regenerate.template_kwargs or "{}")
    assert asked.get("enable_thinking") == recipe.data.enable_thinking, "answered in one mode, trained in another"


def test_recipes_ls_and_show(capsys):
    main(["recipes"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in bundled_recipes())
    assert listed.strip().splitlines()[-1].startswith("next: ")
    main(["recipes", "show", "smollm2-demo"])
    assert tomllib.loads(capsys.readouterr().out)["layout"] == "offline"


def test_recipes_cp_never_overwrites(mistake, tmp_path, capsys):
    to = tmp_path / "mine.toml"
    main(["recipes", "cp", "smollm2-demo", str(to)])
    assert to.read_text() == bundled_recipes()["smollm2-demo"].read_text()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("next: ")
    to.write_text("mine")
    assert "exists and is not overwritten" in mistake.one_line("recipes", "cp", "smollm2-demo", to)


def test_recipes_need_a_name(mistake):
    assert "recipes show needs a name" in mistake.one_line("recipes", "show")


# All verbs, one after the other


def test_every_verb_ends_with_the_next_command(world, recipe, tmp_path, capsys):
    answers, prepared = tmp_path / "answers.jsonl", tmp_path / "prepared"
    target = ["--target.path", str(world / "target")]
    recipe = with_options(recipe, "data", prepared=str(prepared), conversations=str(answers))
    recipe = with_options(with_options(recipe, "optim", steps=3), "evaluation", every=3)
    recipe = replace(recipe, regenerate=replace(recipe.regenerate, prompts=str(world / "prompts.jsonl")))
    recipe = with_options(recipe, "regenerate", output=str(answers), max_new_tokens=16, limit=8)
    file = write(recipe, tmp_path)

    def ran(*words: str) -> str:
        main(list(words))
        said = capsys.readouterr().out
        assert said.strip().splitlines()[-1].startswith("next: draftsmith "), said
        return said

    ran("regenerate", file)
    assert len(answers.read_text().splitlines()) == 8
    ran("prepare", file)
    assert "reusing" in ran("prepare", file, *target)
    ran("preview", file, "--rows", "1")
    ran("train", file)
    results = json.loads((Path(recipe.run) / "results.json").read_text())
    said = ran("evaluate", recipe.run)
    assert f"accept length          {results['accept_length_after']:.3f}" in said, "as the run's own recipe evaluates"
    assert "2 of 2 outputs equal to plain decoding" in said
    assert "1 of 24 prompts" in ran("evaluate", recipe.run, "--evaluation.limit", "1")
    assert "tokens came from the drafter" in ran("generate", recipe.run, "hello", "--max_new_tokens", "8")


def test_the_installed_command_runs():
    command = Path(sys.executable).with_name("draftsmith")
    ended = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.startswith("draftsmith ")


# Code of others


def test_a_recipe_cannot_let_code_run(recipe, mistake, tmp_path):
    file = tmp_path / "shared.toml"
    file.write_text(to_toml(recipe).replace("[target]\n", "[target]\ntrust_remote_code = true\n"))
    said = mistake.one_line("train", file)
    assert "shared.toml sets target.trust_remote_code" in said and "give --target.trust_remote_code True" in said


def test_leave_to_run_code_is_said_aloud_and_kept_in_no_file(recipe, tmp_path, capsys):
    allowed = with_options(recipe, "target", trust_remote_code=True)
    assert "trust_remote_code" not in to_toml(allowed)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "none"), "--target.trust_remote_code", "True"])
    assert "Python code of the target will be run, in whatever version it has today" in capsys.readouterr().err
