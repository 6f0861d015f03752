"""Held-out rows: whole conversations, always the same ones, as prompts that the evaluation reads."""

import json
from dataclasses import replace

import numpy as np
import pytest

from draftsmith.config import DataOptions
from draftsmith.data.chat import render_prompt
from draftsmith.data.dataset import open_prepared
from draftsmith.data.forms import choose_form, read_row
from draftsmith.data.held_out import FILE, draw
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.prompts import read_prompts
from draftsmith.errors import DataError, UserError
from draftsmith.evaluate import make_cases
from draftsmith.targets.hf import HFTarget
from tests.tiny import tiny_target, tiny_tokenizer


def row(question: str, answer: str = "yes", **more) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def chance(one: dict) -> float:
    return draw(read_row(one, 1, choose_form("auto", (), one)))


ROWS = [row(f"question number {i}", f"answer {i}", id=f"row {i}", tags=[f"t{i % 3}"]) for i in range(200)]


def prepared(folder, rows: list[dict], **options) -> tuple[set[str], list[dict], dict, list[str]]:
    """Ids in the set, rows of the held-out file, the manifest and what was said."""
    folder.mkdir(exist_ok=True)
    (folder / "c.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = DataOptions(conversations=str(folder / "c.jsonl"), prepared=str(folder / "set"), **options)
    tokenizer, lines = tiny_tokenizer(), []
    manifest = prepare(tokenizer, tokenizer_fingerprint(tokenizer), data, lines.append)
    file = folder / "set" / FILE
    held = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return set(open_prepared(data.prepared).ids), held, manifest, lines


def test_each_row_is_on_one_side(tmp_path):
    kept, held, manifest, lines = prepared(tmp_path, ROWS, held_out=0.2)
    ids = [one["id"] for one in held]
    assert kept | set(ids) == {one["id"] for one in ROWS} and not kept & set(ids)
    assert 25 < len(ids) < 55
    counts = manifest["counts"]
    assert (counts["held_out"], counts["kept"], counts["rows_in"]) == (len(ids), len(kept), 200)
    assert FILE in manifest["files"]
    assert any(
        line.endswith(f"{FILE}: {len(ids)} prompts of {len(ids)} rows kept out, for evaluation.prompts")
        for line in lines
    )
    assert f"{len(ids)} rows held out" in lines[-1]


def test_sides_are_stable_when_rows_are_added_or_come_in_another_order(tmp_path):
    _, few, *_ = prepared(tmp_path / "few", ROWS[:120], held_out=0.2)
    _, all_of_them, *_ = prepared(tmp_path / "all", ROWS[::-1], held_out=0.2)
    old = {one["id"] for one in ROWS[:120]}
    assert {one["id"] for one in all_of_them} & old == {one["id"] for one in few}
    assert [one["id"] for one in all_of_them if one["id"] in old] == [one["id"] for one in few]  # by their draw
    _, more, *_ = prepared(tmp_path / "more", ROWS, held_out=0.4)
    assert {one["id"] for one in all_of_them} < {one["id"] for one in more}


def test_no_share_no_file(tmp_path):
    kept, held, manifest, lines = prepared(tmp_path, ROWS)
    assert len(kept) == 200 and held == [] and FILE not in manifest["files"]
    assert not any("kept out" in line or "held out" in line for line in lines)


def test_rows_of_one_conversation_are_on_one_side():
    """By its id if it has one, whatever the rows say; else by what the user says first."""
    pieces = [chance(row(f"piece {i}", id=f"c_{i}", conversation_id="c")) for i in range(5)]
    assert len(set(pieces)) == 1
    assert chance(row("piece 0", conversation_id="d")) != pieces[0]
    answers = [chance(row("What is  2+2?", f"answer {i}", id=str(i))) for i in range(5)]
    assert len(set(answers)) == 1 == len({*answers, chance(row("what is 2+2? "))})
    longer = row("What is 2+2?")
    longer["messages"] += [{"role": "user", "content": "and 3+3?"}, {"role": "assistant", "content": "6"}]
    longer["messages"].insert(0, {"role": "system", "content": "be brief"})
    assert chance(longer) == answers[0]


def test_draws_are_even():
    draws = np.array([chance(row(f"question {i}")) for i in range(2_000)])
    assert 0 <= draws.min() and draws.max() < 1
    assert np.abs(np.quantile(draws, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.04


TALK = [
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "3", "train": False},
]


def test_the_prompt_is_what_a_server_would_have_been_sent(tmp_path):
    """Up to the last answer of the target; rendered it is how the row would have begun in the set."""
    talk = {"id": "talk", "messages": TALK, "chat_template_kwargs": {"a": 1}}
    talk = next(one for i in range(99) if chance(one := talk | {"conversation_id": i}) < 0.3)
    _, held, *_ = prepared(tmp_path, [*ROWS[:20], talk], held_out=0.3)
    assert len(held) > 3 and "talk" in {one["id"] for one in held}
    whole = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / "whole"))
    tokenizer = tiny_tokenizer()
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), whole, lambda line: None)
    dataset = open_prepared(whole.prepared)
    samples = {dataset[i].id: dataset[i] for i in range(len(dataset))}
    for prompt in read_prompts(tmp_path / "set" / FILE):
        tokens = render_prompt(tokenizer, list(prompt.messages), arguments=prompt.arguments)
        sample = samples[prompt.id]
        assert sample.tokens[: len(tokens)].tolist() == tokens.tolist()
        assert sample.supervised[len(tokens)] and not sample.supervised[len(tokens) - 1]
        assert prompt.arguments == ({"a": 1} if prompt.id == "talk" else {})
        assert prompt.tags == sample.tags


def test_prompts_with_the_same_messages_are_written_once(tmp_path):
    question = next(question for i in range(99) if chance(row(question := f"same {i}")) < 0.3)
    rows = [row(question, f"answer {i}", id=str(i)) for i in range(5)] + ROWS[:20]
    _, held, manifest, lines = prepared(tmp_path, rows, held_out=0.3)
    assert (
        manifest["counts"]["held_out"] == len(held) + 4
        and [one["messages"][0]["content"] for one in held].count(question) == 1
    )
    assert any(f"{len(held)} prompts of {len(held) + 4} rows kept out" in line for line in lines)


def test_held_out_rows_are_checked_like_others(tmp_path):
    with pytest.raises(DataError, match="tokens, max_length is 20"):
        prepared(tmp_path, ROWS[:5], held_out=0.999, max_length=20)


def test_all_held_out_is_refused(tmp_path):
    with pytest.raises(DataError, match="5 held out"):
        prepared(tmp_path, ROWS[:5], held_out=0.9999)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0, float("nan")])
def test_a_share_that_is_none(tmp_path, share):
    with pytest.raises(UserError, match="give a share"):
        prepared(tmp_path, ROWS[:5], held_out=share)


def test_plain_text_makes_no_prompts(tmp_path):
    with pytest.raises(UserError, match="rows of the form text make no prompts"):
        prepared(tmp_path, [{"text": "hello"}], held_out=0.1)


def test_a_conversation_id_of_another_kind_is_a_bad_row(tmp_path):
    with pytest.raises(DataError, match="conversation_id must be"):
        prepared(tmp_path, [row("a", conversation_id=[1])])


def test_evaluation_renders_prompts_with_their_own_arguments_and_tools():
    """As they were rendered for the set."""
    from draftsmith.config import EvaluationOptions
    from draftsmith.data.prompts import Prompt

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ mode }}{{ tools | length if tools else 0 }}" + tokenizer.chat_template
    target = HFTarget(tiny_target(), tokenizer, (0, 2))
    prompt = Prompt(
        id="p", messages=({"role": "user", "content": "q"},), arguments={"mode": "deep"}, tools=({"type": "function"},)
    )
    options = replace(EvaluationOptions(), max_new_tokens=1)
    (case,) = make_cases(target, [prompt], options, lambda done: None)
    assert tokenizer.decode(case.tokens).startswith("deep1<|im_start|>user")
