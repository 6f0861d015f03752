"""Reading prompts: every fault is named with its line."""

from __future__ import annotations

import json

import pytest

from draftsmith.data.prompts import Prompt, content_id, read_prompts
from draftsmith.errors import DataError

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello."}


def write(path, *rows):
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path


def test_both_forms_ids_and_tags(tmp_path):
    conversation = [SYSTEM, USER, ASSISTANT, USER]
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "Hi"},
        b"\n",
        {"messages": [USER], "tags": ["greeting"]},
        {"messages": conversation, "id": "mine"},
        {"prompt": "日本\u2028", "id": 7},
    )
    first, second, third, fourth = read_prompts(path)
    assert first == Prompt(id=content_id([USER]), messages=(USER,))
    assert second == Prompt(id=first.id, messages=(USER,), tags=("greeting",))
    assert third == Prompt(id="mine", messages=tuple(conversation))
    assert (fourth.id, fourth.messages[0]["content"]) == ("7", "日本\u2028")
    assert read_prompts(path, limit=2) == [first, second]


def test_content_id_is_stable_and_ignores_the_order_of_keys():
    assert content_id([USER]) == content_id([{"content": "Hi", "role": "user"}]) == "f3e8cc5e695bd0b1"
    assert content_id([USER]) != content_id([SYSTEM, USER])


HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": ASSISTANT["content"]}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": [HUMAN, GPT, HUMAN, GPT], "system": "Be brief."}, [SYSTEM, USER, ASSISTANT, USER]),
        ({"conversation": [HUMAN]}, [USER]),
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, [{"role": "user", "content": "Add.\n\n1 and 2"}]),
        ({"question": "Hi", "answer": "Yo."}, [USER]),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [SYSTEM, USER]),
    ],
)
def test_rows_of_any_form_are_asked_again(tmp_path, row, messages):
    """What another model answered to the last question is left out; what it answered earlier is context."""
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", row))
    assert list(prompt.messages) == messages and prompt.id == content_id(messages)


def test_every_answer_can_be_asked_again(tmp_path):
    path = write(tmp_path / "p.jsonl", {"conversations": [HUMAN, GPT, HUMAN, GPT]})
    (prompt,) = read_prompts(path, answered=True)
    assert list(prompt.messages) == [USER, ASSISTANT, USER, ASSISTANT]


def test_reasoning_and_calls_are_kept(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    messages = [USER, call | {"reasoning_content": "Hm."}, {"role": "tool", "content": "3"}]
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": messages, "tools": [{"name": "add"}]}))
    assert list(prompt.messages) == messages and prompt.tools == ({"name": "add"},)


def test_last_line_needs_no_newline(tmp_path):
    assert len(read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a"}, b'{"prompt": "b"}'))) == 2


@pytest.mark.parametrize(
    "row, message",
    [
        (b"{'prompt': 'a'}\n", "property name"),
        (b'{"prompt": "a', "Unterminated string"),
        (b'{"prompt": "\xff"}\n', "can't decode"),
        (b'{"prompt": "\\ud800"}\n', "surrogates not allowed"),
        (["Hi"], "expected an object"),
        ({"text": "Hi"}, "expected one of the keys 'prompt' .*, got 'text'"),
        ({"prompt": "Hi", "messages": [USER]}, "expected one of the keys"),
        ({"prompt": 3}, "both strings"),
        ({"messages": []}, "'messages' must be a list of turns"),
        ({"messages": "Hi"}, "'messages' must be a list of turns"),
        ({"messages": ["Hi"]}, "a turn needs a 'role' and a 'content'"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, "a turn needs a 'role' and a 'content'"),
        ({"prompt": "Hi", "sampling": {"n": 2}}, "'sampling' may hold numbers for temperature"),
        ({"prompt": "Hi", "sampling": {"top_p": "x"}}, "'sampling' may hold numbers"),
        ({"prompt": "Hi", "tools": {"a": 1}}, "'tools' must be a list"),
        ({"messages": [USER, ASSISTANT]}, "the last turn must be the user's, .* it is 'assistant'"),
        ({"prompt": "Hi", "tags": "maths"}, "'tags' must be a list of strings"),
        ({"conversations": [{"from": "gpt", "value": "Hi"}]}, "'messages' must be a list of turns, got ..\\."),
        ({"conversations": [{"from": "narrator", "value": "Hi"}]}, "turn 1 must be an object with a value"),
        ({"prompt": "Hi", "id": ["x"]}, "'id' must be a string"),
        ({"prompt": "Bye", "id": "first"}, "id 'first' already names another prompt, line 1"),
    ],
)
def test_faults_are_named_with_file_and_line(tmp_path, row, message):
    path = write(tmp_path / "p.jsonl", {"prompt": "Hi", "id": "first"}, b"\n", row)
    with pytest.raises(DataError, match=rf"p\.jsonl, line 3: .*{message}"):
        read_prompts(path)
    assert DataError.exit_code == 4


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl: no such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", b"\n\n"))
    with pytest.raises(DataError, match=r"holds no prompts \(limit 0\)"):
        read_prompts(write(tmp_path / "q.jsonl", {"prompt": "a"}), limit=0)
