"""Answers of a tiny target: equal to plain decoding one by one, each row once, whatever kills or reorders the run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from draftsmith.config import RegenerateOptions
from draftsmith.data.prompts import content_id
from draftsmith.data.regenerate import InverseSampling, regenerate
from draftsmith.errors import DataError, UserError
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


def run(model, options, report=lambda line: None):
    counts = regenerate(model, tiny_tokenizer(), options, device=CPU, report=report)
    assert counts.pop("seconds") >= 0
    return counts


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
        }
    ends = {"stop": finishes.count("stop"), "length": finishes.count("length")}
    assert min(ends.values()) > 0
    assert 0 < retokenised <= 10  # random bytes are seldom UTF-8
    assert counts == COUNTS | {"answered": 10, "retokenised": retokenised, "tokens": num_tokens} | ends
    assert lines[-1].startswith(f"10/10 answers, {num_tokens} tokens, ")
    assert len(lines) == 3


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


def test_a_killed_run_resumes_with_each_row_once(model, options, tmp_path):
    whole = replace(options, output=str(tmp_path / "whole.jsonl"))
    run(model, whole)

    def killed(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, options, killed)
    assert len(rows_of(options)) == 4
    with open(options.output, "ab") as file:
        file.write('{"id": "torn", "messages": [{"role": "user", "content": "é'.encode()[:-1])
    counts = run(model, options)
    assert (counts["answered"], counts["skipped"]) == (6, 4)
    assert rows_of(options) == rows_of(whole)
    assert run(model, options) == COUNTS | {"skipped": 10}


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


def test_inverse_sampling_has_the_right_distribution():
    probability = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    levels = torch.tensor([index / 1000 for index in range(1000)] + [1 - 2**-53], dtype=torch.float64)
    draw = InverseSampling(levels[:, None], prompt_width=2)
    scores = probability.log().expand(len(levels), -1)
    chosen = draw(torch.zeros(len(levels), 2, dtype=torch.long), scores).argmax(-1)
    assert chosen.bincount(minlength=6).tolist() == pytest.approx([0, 250, 0, 500, 251, 0], abs=1)
    assert {chosen[0].item(), chosen[-1].item()} == {1, 4}


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


@pytest.mark.parametrize("sampling", [{"temperature": -1}, {"top_p": 2}, {"max_tokens": 0}])
def test_bad_sampling_of_a_row_is_named(model, options, sampling):
    with open(options.prompts, "w", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "Hi", "id": "mine", "sampling": sampling}))
    with pytest.raises(UserError, match="Prompt 'mine': .*(must not be negative|must lie in|must be at least 1)"):
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
        ({"batch": 0}, "batch 0, .* at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: .* at least 1"),
        ({"temperature": -1.0}, "must not be negative"),
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
