"""Rows to a prepared folder: bad rows, further samples of a row, processes, and the options that change the result."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftsmith.config import DataOptions
from draftsmith.data import build, shards
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.sources import Row
from draftsmith.errors import DataError, EnvironmentFault, UserError
from tests.data.test_templates import family
from tests.tiny import tiny_tokenizer


def row(question="Hi", answer="Yo!", **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


ROWS = [row(f"question {i}", f"answer {i}") for i in range(300)]
BAD = [b"oh no\n", row(tags="x"), {"messages": [{"role": "user", "content": "Hi"}]}]


@pytest.fixture
def options(tmp_path):
    options = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / "out"))
    write(options, ROWS)
    return options


def write(options, rows):
    with open(options.conversations, "wb") as file:
        file.writelines(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in rows)


def run(options, tokenizer=None, **more):
    """The manifest and the reported lines."""
    lines = []
    tokenizer = tokenizer or tiny_tokenizer()
    return prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lines.append, **more), lines


def test_the_form_is_said(options):
    manifest, lines = run(options)
    assert lines[0] == f"{options.conversations}: rows of the form messages ('messages'), as the first row shows"
    assert manifest["form"] == "messages ('messages')"
    write(options, [{"q": "Hi", "a": "Yo!"}])
    _, lines = run(replace(options, form="prompt_response", columns=("prompt=q", "response=a")))
    assert lines[1] == f"{options.conversations}: rows of the form prompt_response ('q', 'a')"


def test_bad_rows_up_to_a_limit_are_listed(options):
    write(options, [ROWS[0], BAD[0], ROWS[1], BAD[1], b"\n", BAD[2], ROWS[2]])
    manifest, lines = run(replace(options, max_bad_rows=3))
    assert (manifest["counts"]["rows_in"], manifest["counts"]["kept"], manifest["counts"]["bad"]) == (6, 3, 3)
    listed = [json.loads(line) for line in (Path(options.prepared) / "bad_rows.jsonl").read_text().splitlines()]
    assert [(bad["row"], bad["reason"][:8]) for bad in listed] == [(2, "not JSON"), (4, "tags mus"), (6, "no assis")]
    assert listed[0]["place"] == f"{options.conversations}, line 2"
    assert "3 bad rows" in lines[-1] and any(line.startswith("1 bad rows: not JSON") for line in lines)
    assert run(replace(options, max_bad_rows=3))[1][0].startswith("reusing")
    with pytest.raises(DataError, match="line 2: not JSON"):  # nor does a reused folder get round the limit
        run(options)


def test_one_bad_row_too_many_stops_and_leaves_nothing(options):
    write(options, [ROWS[0], BAD[0], ROWS[1], BAD[1], BAD[2], ROWS[2]])
    with pytest.raises(DataError, match=r"more than 2 bad rows .*, the first: .*line 2: not JSON.*; .*line 4: tags .*"):
        run(replace(options, max_bad_rows=2))
    with pytest.raises(DataError, match=r"c\.jsonl, line 2: not JSON"):
        run(options)
    assert os.listdir(os.path.dirname(options.prepared)) == ["c.jsonl"]


def test_a_bad_first_row_does_not_hide_the_form(options):
    write(options, [b"oh no\n", {"what": 1}, *ROWS[:2]])
    manifest, lines = run(replace(options, max_bad_rows=2))
    assert manifest["counts"]["kept"] == 2 and "messages" in lines[0]
    with pytest.raises(DataError, match="line 1: not JSON"):
        run(replace(options, max_bad_rows=1))


def test_what_is_rendered_wrong_is_a_bad_row_too(options):
    write(options, [ROWS[0], row(answer="x" * 500), row(id="a"), row("Ho", id="a")])
    manifest, _ = run(replace(options, max_bad_rows=2, max_length=100))
    listed = (Path(options.prepared) / "bad_rows.jsonl").read_text()
    assert manifest["counts"]["bad"] == 2 and "max_length is 100" in listed and "id 'a' is row 3's too" in listed


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def test_any_number_of_processes_writes_the_same_bytes(options):
    write(options, [*ROWS, BAD[0], *ROWS[:5], row("cut", "x" * 300)])
    options = replace(options, max_bad_rows=1, max_length=150, overlong="cut")
    run(options)
    other = replace(options, prepared=options.prepared + "2", processes=2)
    manifest, _ = run(other)
    assert files(options.prepared) == files(other.prepared)
    assert manifest["counts"]["kept"] == 301 and manifest["counts"]["dropped"] == {"exact duplicate": 5}


def test_a_killed_process_is_a_fault_of_the_environment(options, monkeypatch):
    def kill(rows):
        while True:
            yield [Row("c.jsonl", "line", 1, b"{}")]
            for child in multiprocessing_children():
                os.kill(child, signal.SIGKILL)

    job = object.__new__(build.Job)
    for name in ("tokenizer", "style", "form", "max_length", "overlong", "context", "held_out"):
        object.__setattr__(job, name, None)
    with pytest.raises(EnvironmentFault, match="was killed"):
        list(build._in_processes(kill(None), job, 1))


def multiprocessing_children():
    import multiprocessing

    return [child.pid for child in multiprocessing.active_children()]


def test_a_row_with_several_samples(options):
    tokenizer, style = family("qwen3")
    talk = [*row("Hi", "Yo!")["messages"], *row("And?", "No.")["messages"]]
    talk[1]["reasoning_content"] = "Hm."
    write(options, [{"messages": talk, "id": "talk", "tags": ["two"]}, row(id="one")])
    manifest, lines = run(options, tokenizer, end_ids=list(style.end_ids))
    assert open_prepared(options.prepared).ids == ["talk#2", "talk#4", "one"]
    assert (manifest["counts"]["rows_in"], manifest["counts"]["kept"], manifest["counts"]["extra"]) == (2, 3, 1)
    assert manifest["counts"]["tags"] == {"two": 2} and "1 of them further turns or pieces of a row" in lines[-1]
    write(options, [row(id="talk#2"), {"messages": talk, "id": "talk"}])
    with pytest.raises(DataError, match="line 2: id 'talk#2' is row 1's too"):
        run(options, tokenizer, end_ids=list(style.end_ids))


CHANGES = {
    "template arguments": {"enable_thinking": False},
    "train_on": {"train_on": "last"},
    "reasoning": {"reasoning": "drop"},
    "form": {"form": "messages"},
    "held_out": {"held_out": 0.01},
    "columns": {"columns": ("messages=messages",)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_new_option_is_in_the_cache_key(options, name):
    run(options)
    _, lines = run(replace(options, **CHANGES[name]))
    assert lines[0].startswith(f"rebuilding {options.prepared}: {name} changed")


def test_the_date_is_in_the_cache_key_if_the_template_writes_it(options):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template + "{# strftime_now('%d') #}"
    manifest, _ = run(options, tokenizer)
    assert manifest["inputs"]["today's date, which the template writes"].count("-") == 2
    given = replace(options, template_kwargs='{"date_string": "1 Jan 2025"}')
    assert run(given, tokenizer)[0]["inputs"]["today's date, which the template writes"] is None


def test_template_arguments_reach_the_template(options):
    tokenizer, style = family("qwen3")
    write(options, [row(), {**row("Ho"), "chat_template_kwargs": {"mode": "x"}}])
    tokenizer.chat_template = "{{ '(' + (mode or '') + (effort or '') + ')' }}" + tokenizer.chat_template
    options = replace(options, template_kwargs='{"effort": "low", "mode": ""}')
    run(options, tokenizer, end_ids=list(style.end_ids))
    texts = [tokenizer.decode(open_prepared(options.prepared)[i].tokens) for i in range(2)]
    assert texts[0].startswith("(low)") and texts[1].startswith("(xlow)")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"template_kwargs": "{"}, "template_kwargs is not JSON"),
        ({"template_kwargs": "[1]"}, "must be a JSON object"),
        ({"template_kwargs": '{"tokenize": false}'}, "argument 'tokenize' belongs to the rendering"),
        ({"template_kwargs": '{"enable_thinking": true}', "enable_thinking": False}, "say different things"),
        ({"max_bad_rows": -1}, "max_bad_rows -1"),
        ({"processes": 0}, "processes 0"),
        ({"min_supervised": 2.0}, "min_supervised 2.0"),
    ],
)
def test_options_that_are_refused(options, change, reason):
    with pytest.raises(UserError, match=reason):
        run(replace(options, **change))


def test_little_supervision_is_allowed_if_told(options):
    write(options, [row("x" * 3000, "ab")])
    with pytest.raises(DataError, match=r"less than 1%.*--data.min_supervised 0 if it is meant"):
        run(options)
    assert run(replace(options, min_supervised=0.0))[0]["counts"]["kept"] == 1
    with pytest.raises(DataError, match="less than 1%"):
        run(options)


def test_plain_text_and_tokens_need_no_template(options):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    write(options, [{"text": "Once upon"}])
    run(replace(options, form="text"), tokenizer)
    sample = open_prepared(options.prepared)[0]
    assert tokenizer.decode(sample.tokens) == "Once upon" and sample.supervised.all()
    write(options, [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [5, 259], "loss_mask": [0, 1]}])
    with pytest.raises(DataError, match="line 2: token 259 is outside the tokenizer's 259"):
        run(replace(options, form="tokens"), tokenizer)
    run(replace(options, form="tokens", max_bad_rows=1), tokenizer)
    sample = open_prepared(options.prepared)[0]
    assert sample.tokens.tolist() == [5, 6, 7] and sample.supervised.tolist() == [False, True, True]


def test_damage_that_leaves_the_size_is_noticed(options):
    run(options)
    path = Path(options.prepared) / "data-00000.arrow"
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):  # a small file is sampled as a whole
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"arrow is damaged \(its content is not what was written\)"):
            open_prepared(options.prepared)
    assert run(options)[1][0].startswith(f"rebuilding {options.prepared}: data-00000.arrow is damaged")


def test_a_change_between_the_samples_is_found_before_a_set_is_reused(options, monkeypatch):
    monkeypatch.setattr("draftsmith.data.store.SAMPLE", 16)
    run(options)
    path = Path(options.prepared) / "data-00000.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    open_prepared(options.prepared)
    assert run(options)[1][0].startswith(f"rebuilding {options.prepared}: data-00000.arrow is damaged")


def test_several_shards(options, monkeypatch):
    run(options)
    one = open_prepared(options.prepared)
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    monkeypatch.setattr(shards, "BATCH", 16)
    other = replace(options, prepared=options.prepared + "2")
    manifest, _ = run(other)
    several = open_prepared(other.prepared)
    assert sum(name.endswith(".arrow") for name in manifest["files"]) > 3
    assert several.ids == one.ids and several.fingerprint == one.fingerprint
    np.testing.assert_array_equal(several[250].tokens, one[250].tokens)


def test_a_cut_off_array_is_noted(options):
    options = replace(options, conversations=options.conversations.replace(".jsonl", ".json"))
    Path(options.conversations).write_text(json.dumps(ROWS)[:-30])
    manifest, lines = run(options)
    assert manifest["counts"]["kept"] == 299 and "cut off after row 299" in manifest["notes"][0]
    assert any(line.startswith("note: ") and "cut off after row 299" in line for line in lines)


def test_the_first_rows_are_checked_against_a_servers_rendering(options, monkeypatch):
    checked = []
    monkeypatch.setattr(build, "check_served", lambda *arguments: checked.append(1))
    run(options)
    assert len(checked) == build.CHECKED
