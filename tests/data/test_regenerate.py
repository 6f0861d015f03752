"""Answers of a tiny target: equal to plain decoding one by one, each row once, whatever kills or reorders the run."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.config import RegenerateOptions
from draftsmith.data.chat import default_style, render
from draftsmith.data.forms import choose_form, read_row
from draftsmith.data.output import Output, open_output
from draftsmith.data.prompts import content_id, read_prompts
from draftsmith.data.regenerate import regenerate
from draftsmith.data.server import regenerate_served
from draftsmith.data.slots import SlotTarget
from draftsmith.errors import DataError, EnvironmentFault, UserError
from tests.data.test_server import FakeServer, completion
from tests.handmade import tiny_drafter
from tests.tiny import tiny_target, tiny_tokenizer

CPU = torch.device("cpu")
TEXTS = [f"{'why ' * (index % 5)}{index}?" for index in range(10)]
COUNTS = dict.fromkeys(["answered", "skipped", "duplicates", "stop", "length", "dropped", "retokenised", "tokens"], 0)


@pytest.fixture(scope="module")
def model():
    """Ends its answers now and then: on any of the twenty byte tokens that stand for ids 3 to 22, or on its eos."""
    model = tiny_target(tied=False)
    model.generation_config.eos_token_id = [2, *range(3, 23)]
    return model


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "tags": ["t"]}) + "\n" for text in TEXTS))
    return RegenerateOptions(prompts=str(path), output=str(tmp_path / "new" / "out.jsonl"), batch=4, max_new_tokens=20)


def run(model, options, report=lambda line: None, drafter=None):
    counts = regenerate(model, tiny_tokenizer(), options, device=CPU, report=report, drafter=drafter)
    assert counts.pop("seconds") >= 0
    return counts


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def talk(number: int) -> list[dict]:
    """Three questions, two of them answered by somebody else, the second with the help of a tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": str(number)}
    called = [assistant("", tool_calls=[call]), result, assistant("old 2")]
    return [user(f"{number}?"), assistant("old 1"), user("why " * (number % 4)), *called]


def write_rows(path, rows) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(options) -> dict[str, dict]:
    with open(options.output, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_greedy_answers_equal_a_slow_reference(model, options):
    lines = []
    counts = run(model, options, lines.append)
    tokenizer, rows, num_tokens, finishes, retokenised = tiny_tokenizer(), rows_of(options), 0, [], 0
    for text in TEXTS:
        messages = [{"role": "user", "content": text}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer: list[int] = []
        while len(answer) < 20 and not (answer and answer[-1] in [2, *range(3, 23)]):
            with torch.inference_mode():
                answer.append(int(model(torch.tensor([tokens + answer])).logits[0, -1].argmax()))
        num_tokens += len(answer)
        finishes.append("stop" if answer[-1] in [2, *range(3, 23)] else "length")
        answer = answer[:-1] if finishes[-1] == "stop" else answer
        content = tokenizer.decode(answer)
        retokenised += tokenizer(content)["input_ids"] != answer
        assert rows[content_id(messages)] == {
            "id": content_id(messages),
            "messages": [*messages, {"role": "assistant", "content": content}],
            "tags": ["t"],
            "finish": finishes[-1],
            "asked": content_id(messages),
        }
    ends = {"stop": finishes.count("stop"), "length": finishes.count("length")}
    assert min(ends.values()) > 0
    assert 0 < retokenised <= 10  # random bytes are seldom UTF-8
    assert counts == COUNTS | {"answered": 10, "retokenised": retokenised, "tokens": num_tokens} | ends
    assert len(lines) == 1 and lines[0].startswith(f"10/10 answers, {num_tokens} tokens, ")


def test_the_models_own_generation_defaults_do_not_bend_its_answers(model, options):
    run(model, options)
    bent = tiny_target(tied=False)
    bent.generation_config.eos_token_id = model.generation_config.eos_token_id
    bent.generation_config.repetition_penalty = 3.0
    bent.generation_config.suppress_tokens = list(range(100, 200))
    other = replace(options, output=options.output + ".bent")
    run(bent, other)
    assert rows_of(other) == rows_of(options)
    assert bent.generation_config.repetition_penalty == 3.0


@pytest.mark.parametrize("drafter", [None, tiny_drafter()])
def test_a_stopped_run_resumes_with_each_row_once(model, options, tmp_path, monkeypatch, drafter):
    whole = replace(options, output=str(tmp_path / "whole.jsonl"))
    run(model, whole)
    append = Output.append

    def killed(self, row):
        if len(rows_of(options)) == 4:
            raise KeyboardInterrupt
        append(self, row)

    monkeypatch.setattr(Output, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        run(model, options, drafter=drafter)
    monkeypatch.undo()
    assert len(rows_of(options)) == 4
    with open(options.output, "ab") as file:
        file.write('{"id": "torn", "messages": [{"role": "user", "content": "é'.encode()[:-1])
    counts = run(model, options)
    assert (counts["answered"], counts["skipped"]) == (6, 4)
    assert rows_of(options) == rows_of(whole)
    assert run(model, options) == COUNTS | {"skipped": 10}


CHILD = """
    import sys, torch
    from draftsmith.config import RegenerateOptions
    from draftsmith.data.regenerate import regenerate
    from tests.handmade import tiny_drafter
    from tests.tiny import tiny_target, tiny_tokenizer
    torch.set_num_threads(1)
    model = tiny_target(tied=False)
    model.generation_config.eos_token_id = [2, *range(3, 23)]
    options = RegenerateOptions(prompts=sys.argv[1], output=sys.argv[2], turns="all", batch=4, max_new_tokens=20)
    regenerate(model, tiny_tokenizer(), options, device=torch.device("cpu"), report=print, drafter=tiny_drafter())
"""


def test_a_kill_in_mid_run_and_a_resume_give_each_row_once(model, options, tmp_path):
    talks = [[*talk(number), user("and?")] for number in range(60)]
    write_rows(options.prompts, [{"id": str(number), "messages": one} for number, one in enumerate(talks)])
    options = replace(options, turns="all")
    whole = replace(options, output=str(tmp_path / "whole.jsonl"))
    run(model, whole)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    for least in (3, 20):
        command = [sys.executable, "-c", textwrap.dedent(CHILD), options.prompts, options.output]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while not Path(options.output).exists() or Path(options.output).read_bytes().count(b"\n") < least:
            time.sleep(0.002)
            assert child.poll() is None
        child.kill()
        child.wait()
    kept = Path(options.output).read_bytes().count(b"\n")
    assert 20 <= kept < 60
    lines = Path(options.prompts).read_text().splitlines(keepends=True)
    Path(options.prompts).write_text("".join([*reversed(lines), lines[0]]))
    counts = run(model, options)
    assert (counts["skipped"], counts["answered"], counts["duplicates"]) == (kept, 60 - kept, 1)
    assert rows_of(options) == rows_of(whole)


def test_order_limit_and_duplicates(model, options):
    assert run(model, replace(options, limit=3))["answered"] == 3
    with open(options.prompts, encoding="utf-8") as file:
        lines = file.readlines()
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.writelines([*reversed(lines), *lines[:2]])
    counts = run(model, options)
    assert (counts["answered"], counts["skipped"], counts["duplicates"]) == (7, 3, 2)
    assert len(rows_of(options)) == 10


def test_unfinished_answers_are_dropped_and_counted(model, options):
    counts = run(model, replace(options, unfinished="drop"))
    assert counts["dropped"] == counts["length"] > 0
    assert counts["answered"] == counts["stop"] == 10 - counts["dropped"]
    assert {row["finish"] for row in rows_of(options).values()} == {"stop"}


def test_sampled_answers_depend_on_seed_and_row_alone(model, options):
    sampled = replace(options, temperature=1.3, top_k=100, top_p=0.9)
    run(model, sampled)
    alone = replace(sampled, output=options.output + ".alone", batch=1)
    run(model, alone)
    assert rows_of(alone) == rows_of(sampled)
    other_seed = replace(sampled, output=options.output + ".seed", seed=1)
    run(model, other_seed)
    assert rows_of(other_seed) != rows_of(sampled)
    greedy = replace(options, output=options.output + ".greedy")
    run(model, greedy)
    assert rows_of(greedy) != rows_of(sampled)


def test_multi_turn_prompts_keep_their_turns(model, options):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.write(json.dumps({"messages": turns, "id": "mine"}))
    run(model, options)
    row = rows_of(options)["mine"]
    turns[2] |= {"train": False}  # the target did not write it
    assert row["messages"][:-1] == turns and row["messages"][-1]["role"] == "assistant"
    assert run(model, options)["skipped"] == 1


def test_a_row_may_have_sampling_options_of_its_own(model, options, tmp_path):
    rows = [{"prompt": text, "id": text} for text in TEXTS]
    own = {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "max_tokens": 5, "seed": 7}
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row | ({"sampling": own} if i % 2 else {})) + "\n" for i, row in enumerate(rows))
    run(model, options)
    mixed = rows_of(options)
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    plain = replace(options, output=str(tmp_path / "plain"))
    same = dict(temperature=1.3, top_k=50, top_p=0.9, max_new_tokens=5, seed=7)
    sampled = replace(options, output=str(tmp_path / "sampled"), **same)
    run(model, plain), run(model, sampled)
    for number, text in enumerate(TEXTS):
        assert mixed[text] == rows_of(sampled if number % 2 else plain)[text]
    assert rows_of(plain) != rows_of(sampled)


@pytest.mark.parametrize(
    "sampling", [{"temperature": -1}, {"temperature": math.nan}, {"top_p": 2}, {"max_tokens": 0}, {"min_p": 1.5}]
)
def test_bad_sampling_of_a_row_is_named(model, options, sampling):
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "Hi", "id": "mine", "sampling": sampling}))
    with pytest.raises(UserError, match="Prompt 'mine': .*(not negative|must lie in|must be at least 1)"):
        run(model, options)


def test_min_p_leaves_only_likely_tokens(model, options, tmp_path):
    """With min_p 1 only the likeliest token is left, which is what greedy decoding takes."""
    run(model, options)
    with open(options.prompts, "w", encoding="utf-8") as file:
        own = {"temperature": 1.0, "min_p": 1.0}
        file.writelines(json.dumps({"prompt": text, "tags": ["t"], "sampling": own}) + "\n" for text in TEXTS)
    other = replace(options, output=str(tmp_path / "other"))
    run(model, other)
    assert rows_of(other) == rows_of(options)


def test_bad_input_is_refused_before_anything_is_written(model, options, tmp_path):
    with open(options.prompts, "a", encoding="utf-8") as file:
        file.write('{"prompt": 3}\n')
    with pytest.raises(DataError, match="prompts.jsonl, line 11: "):
        run(model, options)
    assert not (tmp_path / "new").exists()
    run(model, replace(options, limit=10))  # the fault lies beyond the limit
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 2100, "id": "long"}))
    with pytest.raises(DataError, match="Prompt 'long' has 21.. tokens; the target has room for 2028"):
        run(model, replace(options, prompts=str(long)))


def test_a_damaged_output_is_left_alone(model, options, tmp_path):
    output = tmp_path / "out.jsonl"
    damaged = b'{"id": "x", "messages": [{}]}\n{"no": "row"}\n{"torn'
    output.write_bytes(damaged)
    with pytest.raises(DataError, match="out.jsonl, line 2: not a conversation"):
        run(model, replace(options, output=str(output)))
    assert output.read_bytes() == damaged


def test_one_id_for_two_prompts_is_refused(model, options):
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "a", "id": "same"}))
    run(model, options)
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "b", "id": "same"}))
    with pytest.raises(DataError, match="id 'same' answers another prompt"):
        run(model, options)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"output": ""}, "needs both 'prompts' and 'output'"),
        ({"batch": 0}, "batch 0: .* at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: .* at least 1"),
        ({"temperature": -1.0}, "not negative"),
        ({"temperature": math.nan}, "temperature nan.*must be numbers"),
        ({"temperature": math.inf}, "temperature inf.*must be numbers"),
        ({"limit": 0}, "limit is 0; .* at least 1"),
        ({"cuda_graph": True}, "cuda_graph needs a GPU"),
        ({"model": "mine"}, "need 'servers'"),
        ({"top_p": 0.0}, r"must lie in \(0, 1\]"),
    ],
)
def test_bad_options(model, options, change, message):
    with pytest.raises(UserError, match=message):
        run(model, replace(options, **change))
    with pytest.raises(UserError, match="same file"):
        run(model, replace(options, output=options.prompts))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        regenerate(model, tokenizer, options, device=CPU, report=print)


def test_a_template_that_refuses_a_prompt_is_named(model, options):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system turn, please') }}"
    with pytest.raises(DataError, match="Prompt '.*': the chat template refuses the conversation: no system turn"):
        regenerate(model, tokenizer, options, device=CPU, report=print)


def test_every_turn_equals_what_a_server_of_the_target_writes(model, options):
    """The same rows by both ways; the server decodes a whole conversation anew for every token."""
    rows = [{"id": str(number), "messages": talk(number), "tags": ["t"]} for number in range(6)]
    rows += [{"id": "cut", "messages": [*talk(7), user("and?")]}, {"prompt": "alone"}]
    write_rows(options.prompts, rows)
    options, tokenizer = replace(options, turns="all", token_ids=True), tiny_tokenizer()

    def reply(body):
        tokens = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        answer, stops = [], [2, *range(3, 23)]
        while len(answer) < 20 and not (answer and answer[-1] in stops):
            with torch.inference_mode():
                answer.append(int(model(torch.tensor([tokens + answer])).logits[0, -1].argmax()))
        ended = answer[-1] in stops
        text, finish = tokenizer.decode(answer[:-1] if ended else answer), "stop" if ended else "length"
        return completion(text, finish, more={"token_ids": answer}) | {"prompt_token_ids": tokens}

    served = replace(options, output=options.output + ".served")
    with FakeServer(reply) as server:
        regenerate_served(replace(served, servers=(server.url,)), lambda line: None)
    counts = run(model, options)
    assert rows_of(options) == rows_of(served)
    assert counts["answered"] == 8 and counts["shortened"] == 0
    ends = [[m["role"] for m in row["messages"]] for row in rows_of(options).values() if row["finish"] == "stop"]
    assert ["user", "assistant", "user", "assistant", "tool", "assistant"] in ends
    drafted = replace(options, output=options.output + ".drafted")
    assert run(model, drafted, drafter=tiny_drafter())["accept_length"] >= 1
    assert rows_of(drafted) == rows_of(options)


def test_tool_turns_are_kept_and_given_calls_are_marked(model, options):
    write_rows(options.prompts, [{"id": "t", "messages": talk(3), "tools": [{"type": "function"}]}])
    run(model, replace(options, turns="all", max_new_tokens=200, seed=1))
    row = rows_of(options)["t"]
    assert row["tools"] == [{"type": "function"}] and row["finish"] == "stop"
    given = talk(3)
    for number in (0, 2, 4):
        assert row["messages"][number] == given[number]
    assert row["messages"][3] == {**given[3], "train": False}
    assert all("old" not in message["content"] for message in row["messages"])
    assert row["asked"] == content_id(given)


def test_turns_draw_numbers_of_their_own(model, options):
    """The same question twice, sampled: two answers; and the first is the one that `turns last` gives."""
    options = replace(options, temperature=1.5, max_new_tokens=6)
    model.generation_config.eos_token_id, usual = 2, model.generation_config.eos_token_id
    try:
        write_rows(options.prompts, [{"id": str(n), "prompt": "a?"} for n in range(20)])
        run(model, replace(options, unfinished="keep"))
    finally:
        model.generation_config.eos_token_id = usual
    assert len({row["messages"][-1]["content"] for row in rows_of(options).values()}) > 15


def test_a_conversation_without_room_ends_with_its_last_answer(model, options):
    turns = [user("short"), assistant("old"), user("x" * 2100), assistant("old"), user("never asked")]
    write_rows(options.prompts, [{"id": str(n), "messages": [user(f"{n}?"), *turns[1:]]} for n in range(8)])
    counts = run(model, replace(options, turns="all"))
    finishes = [row["finish"] for row in rows_of(options).values()]
    assert counts["shortened"] == finishes.count("stop") > 0
    assert counts["length"] == finishes.count("length") and counts["answered"] == 8
    for row in rows_of(options).values():
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_token_ids_are_those_that_prepare_takes(model, options):
    run(model, replace(options, token_ids=True))
    tokenizer, finishes = tiny_tokenizer(), set()
    for number, row in enumerate(rows_of(options).values(), 1):
        (served,) = row["served"]
        (question, answer), finish = row["messages"], row["finish"]
        assert served["message"] == 1
        asked = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
        assert served["prompt_ids"] == asked
        whole = served["answer_ids"] if finish == "length" else served["answer_ids"][:-1]
        assert tokenizer.decode(whole) == answer["content"]
        conversation = read_row(row, number, choose_form("auto", (), row))
        style = replace(default_style(tokenizer), end_ids=frozenset([2, *range(3, 23)]))
        (rendered,) = render(tokenizer, row["messages"], style, finish=finish, served=conversation.served)
        assert rendered.tokens[rendered.supervised].tolist() == served["answer_ids"]
        finishes.add(finish)
    assert finishes == {"stop", "length"}


def test_a_drafter_is_counted_and_changes_no_row(model, options):
    for change in ({}, {"temperature": 1.3, "top_k": 100}):
        plain = replace(options, output=f"{options.output}.{len(change)}", **change)
        drafted = replace(plain, output=plain.output + ".drafted")
        counts, helped = run(model, plain), run(model, drafted, drafter=tiny_drafter())
        assert rows_of(drafted) == rows_of(plain)
        assert helped["accept_length"] == pytest.approx((helped["tokens"] - 10) / helped["cycles"])
        assert {name: helped[name] for name in counts} == counts


def test_two_writers_are_refused(model, options):
    with open_output(Path(options.output), read_prompts(options.prompts), options.prompts):
        with pytest.raises(UserError, match="is being written by another process"):
            run(model, options)
    assert not Path(options.output).parent.exists(), "nothing was written, so nothing is left behind"


def test_an_output_that_cannot_be_written(model, options, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "folder", tmp_path / "file" / "out.jsonl"):
        with pytest.raises(UserError, match=r"cannot be written \((it is a folder|.* is not writable)\); name another"):
            run(model, replace(options, output=str(output)))
        with pytest.raises(UserError, match="cannot be written.*choose another regenerate.output"):
            open_output(output, [], "").__enter__()
    inner = os.write

    def full(file, data):
        if Path(options.output).stat().st_size > 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(file, bytes(data)[:100])  # a nearly full disk takes a part

    monkeypatch.setattr("draftsmith.data.output.os.write", full)
    with pytest.raises(EnvironmentFault, match="No space left.*same command again"):
        run(model, options)
    monkeypatch.undo()
    assert Path(options.output).stat().st_size > 500
    assert run(model, options)["answered"] + len(rows_of(options)) > 10
    assert len(rows_of(options)) == 10


def test_a_full_gpu_is_one_line_and_keeps_the_rows(model, options, monkeypatch):
    inner = SlotTarget.prefill

    def full(self, *given):
        if Path(options.output).stat().st_size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return inner(self, *given)

    monkeypatch.setattr(SlotTarget, "prefill", full)
    with pytest.raises(EnvironmentFault, match="no memory left on the GPU with regenerate.batch 4.*smaller batch"):
        run(model, options)
    monkeypatch.undo()
    kept = len(rows_of(options))
    assert 0 < kept < 10
    assert run(model, replace(options, batch=2))["skipped"] == kept
