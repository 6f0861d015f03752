"""Rendering: exact masks written by hand, and everything that must be refused."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.data import chat
from draftsmith.data.chat import default_style, render_prompt
from draftsmith.errors import DataError, UserError
from tests.tiny import CHATML, SPECIALS, tiny_tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def render(tokenizer, messages, *, end_ids=None, **more):
    """The only sample of a conversation."""
    (sample,) = chat.render(tokenizer, messages, default_style(tokenizer, end_ids), **more)
    return sample[:2]


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def expect(rendered, *pieces, tokenizer=None):
    """Compares with (text, supervised) pieces, each encoded by itself: the tiny tokenizer joins no bytes."""
    tokenizer = tokenizer or tiny_tokenizer()
    tokens, supervised = rendered
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in pieces]
    marks = [[mark] * len(part) for part, (_, mark) in zip(ids, pieces, strict=True)]
    assert tokens.dtype == np.int64 and supervised.dtype == bool
    assert tokens.tolist() == sum(ids, [])
    assert supervised.tolist() == sum(marks, [])


def test_single_turn():
    rendered = render(tiny_tokenizer(), [user("Hi"), assistant("Yo!")])
    expect(rendered, (ASK, False), ("Yo!<|im_end|>", True), ("\n", False))


def test_multi_turn_with_system():
    rendered = render(tiny_tokenizer(), [SYSTEM, user("Hi"), assistant("Yo!"), user("And?"), assistant("Nö.")])
    expect(
        rendered,
        ("<|im_start|>system\nBe brief.<|im_end|>\n" + ASK, False),
        ("Yo!<|im_end|>", True),
        ("\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Nö.<|im_end|>", True),
        ("\n", False),
    )


def test_a_system_turn_that_the_template_adds():
    template = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + CHATML
    rendered = render(with_template(template), [user("Hi"), assistant("Yo!")])
    system = "<|im_start|>system\nHelp.<|im_end|>\n"
    expect(rendered, (system + ASK, False), ("Yo!<|im_end|>", True), ("\n", False))


def test_role_markers_quoted_by_the_user_are_never_supervised():
    quote = "Hi<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>"
    rendered = render(tiny_tokenizer(), [user(quote), assistant("Yo!")])
    asked = f"<|im_start|>user\n{quote}<|im_end|>\n<|im_start|>assistant\n"
    expect(rendered, (asked, False), ("Yo!<|im_end|>", True), ("\n", False))


def test_an_end_token_quoted_in_an_answer_does_not_end_it():
    answer = "write <|im_end|> or <|im_start|>assistant\n there"
    rendered = render(tiny_tokenizer(), [user("Hi"), assistant(answer)])
    expect(rendered, (ASK, False), (f"{answer}<|im_end|>", True), ("\n", False))


def test_an_empty_answer_is_its_end_token():
    rendered = render(tiny_tokenizer(), [user("Hi"), assistant("")])
    expect(rendered, (ASK, False), ("<|im_end|>", True), ("\n", False))


def test_tool_results_are_context_and_calls_are_supervised():
    template = CHATML.replace(
        "message['content'] +",
        "(message.content or '') + (message.tool_calls | tojson if message.tool_calls else '') +",
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [user("Hi"), call, {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, assistant("7")]
    expect(
        render(with_template(template), messages),
        (ASK, False),
        ('[{"function": {"name": "add"}}]<|im_end|>', True),
        ("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n", False),
        ("7<|im_end|>", True),
        ("\n", False),
    )


def test_tools_reach_the_template():
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    rendered = render(with_template(template), [user("Hi"), assistant("Yo!")], tools=[{"name": "add"}])
    expect(rendered, ('[{"name": "add"}]' + ASK, False), ("Yo!<|im_end|>", True), ("\n", False))


def test_a_cut_answer_has_no_supervised_end():
    messages = [user("Hi"), assistant("Yo!"), user("And?"), assistant("No <|im_end|>, bec")]
    expect(
        render(tiny_tokenizer(), messages, finish="length"),
        (ASK, False),
        ("Yo!<|im_end|>", True),
        ("\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", False),
        ("No <|im_end|>, bec", True),
        ("<|im_end|>\n", False),
    )


def test_without_an_end_token_the_turn_counts_whole():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    messages = [user("Hi"), assistant("Yo!"), user("And?"), assistant("No.")]
    expect(
        render(with_template(template), messages),
        ("user: Hi\nassistant: ", False),
        ("Yo!\n", True),
        ("user: And?\nassistant: ", False),
        ("No.\n", True),
    )
    with pytest.raises(DataError, match="message 4 .*no end-of-turn token"):
        render(with_template(template), messages, finish="length")


def test_other_end_tokens_can_be_named():
    template = CHATML.replace("'<|im_end|>' +", "('<|endoftext|>' if message.role == 'assistant' else '<|im_end|>') +")
    messages = [user("Hi"), assistant("Yo<|im_end|>!")]
    rendered = render(with_template(template), messages, end_ids=[0, 2])
    expect(rendered, (ASK, False), ("Yo<|im_end|>!<|endoftext|>", True), ("\n", False))


def newline_tokenizer():
    """Two newlines are one token here, as in real vocabularies."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet, "ĊĊ"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SPECIALS[1], eos_token=SPECIALS[2], pad_token=SPECIALS[0], chat_template=CHATML
    )


def test_an_answer_that_would_merge_with_its_prompt():
    """The target was sent the prompt's own tokens; a server joins them with the answer only in a later prompt."""
    tokenizer = newline_tokenizer()
    messages = [user("Hi"), assistant("\nYo\n\n!"), user("And?"), assistant("\nNo.")]
    first, second = chat.render(tokenizer, messages, default_style(tokenizer))
    expect(first[:2], (ASK, False), ("\nYo\n\n!<|im_end|>", True), ("\n", False), tokenizer=tokenizer)
    asked = ASK + "\nYo\n\n!<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    expect(second[:2], (asked, False), ("\nNo.<|im_end|>", True), ("\n", False), tokenizer=tokenizer)
    for sample in (first, second):
        prompt = render_prompt(tokenizer, messages[: sample.last])
        assert sample.tokens[: len(prompt)].tolist() == prompt.tolist() and sample.supervised[len(prompt)]


REWRITING = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last or m.role == 'user' else '(gone)') + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_gives_a_sample_for_each():
    tokenizer = with_template(REWRITING)
    messages = [user("Hi"), assistant("Yo!"), user("And?"), assistant("No.")]
    first, second = chat.render(tokenizer, messages, default_style(tokenizer))
    expect(first[:2], (ASK, False), ("Yo!<|im_end|>", True), ("\n", False))
    asked = ASK + "(gone)<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    expect(second[:2], (asked, False), ("No.<|im_end|>", True), ("\n", False))


def test_a_template_whose_prompt_is_no_prefix_is_refused():
    template = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\nSure: '")
    with pytest.raises(DataError, match=r"message 2 \(assistant\).*is not a prefix"):
        render(with_template(template), [user("Hi"), assistant("Yo!")])


def test_what_the_template_refuses_is_a_data_error():
    with pytest.raises(DataError, match="refuses the conversation: no systems here"):
        render(with_template("{{ raise_exception('no systems here') }}"), [SYSTEM, user("Hi"), assistant("Yo!")])
    with pytest.raises(DataError, match="refuses the conversation"):
        render(with_template("{{ 1 + messages[0].content }}"), [user("Hi"), assistant("Yo!")])


@pytest.mark.parametrize("call", [render, render_prompt])
def test_without_a_template(call):
    with pytest.raises(UserError, match="no chat template; use an instruct model") as caught:
        call(with_template(None), [user("Hi"), assistant("Yo!")])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ("Hi", "at least one message"),
        (["Hi"], "message 1 must be an object"),
        ([{"role": "human", "content": "Hi"}], "message 1 must be an object whose role is one of"),
        ([user("Hi")], "no assistant message"),
        ([SYSTEM], "no assistant message"),
        ([assistant("Yo!")], "message 1 is 'assistant' at the beginning, where only system or developer or user"),
        ([user("Hi"), user("Hi"), assistant("Yo!")], "message 2 is 'user' after 'user', where only assistant"),
        ([user("Hi"), assistant("Yo!"), assistant("Yo!")], "message 3 is 'assistant' after 'assistant'"),
        ([user("Hi"), SYSTEM, assistant("Yo!")], "message 2 is 'system' after 'user'"),
        ([SYSTEM, SYSTEM, user("Hi"), assistant("Yo!")], "message 2 is 'system' after 'system'"),
        ([user("Hi"), {"role": "tool", "content": "3"}, assistant("Yo!")], "message 2 is 'tool' after 'user'"),
        ([user("Hi"), {"role": "assistant", "content": None}], "message 2 .* has no text"),
        ([{"role": "user", "content": [{"type": "text"}]}, assistant("Yo!")], "message 1 .* has no text"),
    ],
)
def test_messages_that_are_refused(messages, reason):
    with pytest.raises(DataError, match=reason):
        render(tiny_tokenizer(), messages)


def test_an_unknown_finish_is_refused():
    with pytest.raises(DataError, match="finish is 'eos'; it may be stop, length, tool_calls"):
        render(tiny_tokenizer(), [user("Hi"), assistant("Yo!")], finish="eos")


def test_a_conversation_may_end_with_a_question():
    rendered = render(tiny_tokenizer(), [user("Hi"), assistant("Yo!"), user("And?")])
    expect(rendered, (ASK, False), ("Yo!<|im_end|>", True), ("\n<|im_start|>user\nAnd?<|im_end|>\n", False))


def test_prompts():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(render_prompt(tokenizer, [user("Hi")])) == ASK
    assert render_prompt(tokenizer, [user("Hi")]).dtype == np.int64
    with pytest.raises(DataError, match="ends with a user or tool message, not with 'assistant'"):
        render_prompt(tokenizer, [user("Hi"), assistant("Yo!")])
