"""With thinking and without: what a set shows of its target's modes, and what a run says if one is missing."""

from __future__ import annotations

import json

import pytest

from draftsmith.config import DataOptions, OptimOptions, PackOptions
from draftsmith.data.modes import find_switch, missing_mode
from draftsmith.data.plan import Plan, make_plan
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from tests.data.test_templates import FOLDER, assistant, family, user

PACK = PackOptions(tokens=4_000, anchors=200, anchors_per_document=8, anchor_density=0.5)
THOUGHT = {"messages": [user("2 + 2?"), assistant("4", "Easy.")]}
INLINE = {"messages": [user("3 + 3?"), assistant("<think>\nEasy.\n</think>\n\n6")]}
PLAIN = {"messages": [user("Hi"), assistant("Yo!")]}
OFF = {"messages": [user("Hey"), assistant("Yo!")], "chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("name", "switch"),
    [("qwen3", "enable_thinking"), ("glm", "enable_thinking"), ("deepseek", "thinking")]
    + [(name, "") for name in ("qwen25", "llama3", "gemma", "mistral", "harmony", "deepseek_generation")],
)
def test_templates_with_a_switch(name, switch):
    assert find_switch((FOLDER / f"{name}.jinja").read_text()) == switch


def test_what_is_no_switch():
    assert find_switch("{{ messages[0].thinking }}{% set enable_thinking = 1 %}{{ enable_thinking }}") == ""
    assert find_switch("{{ a broken") == find_switch("") == ""


def make(tmp_path, name: str, rows: list[dict], **options) -> tuple[dict, list[str], str]:
    """The manifest, what was said, and the folder."""
    file, lines = tmp_path / f"{name}.jsonl", []
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, _ = family("qwen3")
    data = DataOptions(conversations=str(file), prepared=str(tmp_path / name), **options)
    return prepare(tokenizer, tokenizer_fingerprint(tokenizer), data, lines.append), lines, data.prepared


def plan_of(**data) -> Plan:
    return make_plan(DataOptions(**data), PACK, OptimOptions(epochs=1), 0, [], family("qwen3")[0])


def test_rows_are_counted_by_mode(tmp_path):
    manifest, lines, _ = make(tmp_path, "both", [THOUGHT, INLINE, PLAIN, OFF, PLAIN])
    assert manifest["counts"]["modes"] == {
        "enable_thinking not given, with a thought": 2,
        "enable_thinking not given, without a thought": 1,
        "enable_thinking=false, without a thought": 1,
    }
    assert not any("thinking" in line for line in lines)
    dropped, lines, _ = make(tmp_path, "dropped", [THOUGHT, PLAIN], reasoning="drop")
    assert dropped["counts"]["modes"] == {"enable_thinking not given, without a thought": 2}
    (line,) = [line for line in lines if line.startswith("note: ")]
    assert "the target not thinking (2 rows enable_thinking not given, without a thought)" in line
    assert "served with thinking, the drafter will accept less" in line
    tokens = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    assert make(tmp_path, "tokens", [tokens])[0]["counts"]["modes"] == {}


def test_a_run_says_if_all_its_sets_are_of_one_mode(tmp_path):
    thinking = make(tmp_path, "thinking", [THOUGHT, INLINE])[2]
    plain = make(tmp_path, "plain", [PLAIN, OFF])[2]
    (warning,) = plan_of(prepared=thinking).warnings
    assert warning.startswith("all answers are those of the target thinking (2 rows enable_thinking not given, with a")
    assert "served without thinking" in warning
    both = plan_of(mix=(thinking, f"{plain}=0.5"))
    assert both.warnings == () and sum(both.dataset.counts["modes"].values()) == 4
    assert missing_mode({}) == ""


def test_a_run_says_if_prompts_would_be_rendered_otherwise_than_the_sets(tmp_path):
    def warned(**data) -> list[str]:
        return [line for line in plan_of(**data).warnings if "was rendered with" in line]

    off = make(tmp_path, "off", [PLAIN, OFF], enable_thinking=False)[2]
    (warning,) = warned(prepared=off)
    assert f'{off} was rendered with the template arguments {{"enable_thinking": false}}, but' in warning
    assert "say {}, and held-out prompts, `generate` and exports follow the recipe" in warning
    assert warned(prepared=off, enable_thinking=False) == []
    assert warned(prepared=off, template_kwargs='{"enable_thinking": false}') == []
    on = make(tmp_path, "on", [THOUGHT])[2]
    assert warned(mix=(on, off)) == []
    assert len(warned(mix=(on, off), template_kwargs='{"other": 1}')) == 1
