"""The families' templates, in fixtures of our own of the same structure: what is supervised, written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from draftsmith.data.chat import Style, check_served, default_style, render
from draftsmith.data.messages import normalise
from draftsmith.errors import DataError
from tests.tiny import tiny_tokenizer

FOLDER = Path(__file__).parent / "templates"

# name -> (bos, end tokens, other special tokens)
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "qwen25": ("<|endoftext|>", ("<|im_end|>",), ("<tool_call>", "</tool_call>")),
    "qwen3": ("<|endoftext|>", ("<|im_end|>",), ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "llama3": ("<|begin_of_text|>", ("<|eot_id|>",), ("<|start_header_id|>", "<|end_header_id|>")),
    "gemma": ("<bos>", ("<end_of_turn>",), ("<start_of_turn>",)),
    "mistral": ("<s>", ("</s>",), ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
    "harmony": ("<|endoftext|>", ("<|return|>", "<|call|>"), ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")),
    "deepseek": ("<|bos|>", ("<|eos|>",), ("<|User|>", "<|Assistant|>", "<think>", "</think>")),
    "deepseek_generation": ("<|bos|>", ("<|eos|>",), ("<|User|>", "<|Assistant|>", "<think>", "</think>")),
    "glm": ("[gMASK]", ("<|user|>", "<|observation|>"), ("<|assistant|>", "<think>", "</think>")),
}


def family(name):
    """A byte tokenizer with the family's special tokens and template, and its style."""
    bos, ends, others = FAMILIES[name]
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([bos, *ends, *others], special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = bos, ends[0]
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return tokenizer, default_style(tokenizer, [tokenizer.convert_tokens_to_ids(end) for end in ends])


def user(text):
    return {"role": "user", "content": text}


def assistant(text, thought=None, **more):
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {}), **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text):
    return {"role": "tool", "content": text}


def learned(name, messages, *, tools=None, finish="stop", **style):
    """For each sample: its text with what is supervised in [[ ]]."""
    tokenizer, base = family(name)
    base = replace(base, **style)
    found = render(tokenizer, messages, base, tools=tools, finish=finish)
    shown = []
    for sample in found:
        check_served(tokenizer, messages, base, sample, tools)
        text, inside = "", False
        for token, supervised in zip(sample.tokens.tolist(), sample.supervised.tolist(), strict=True):
            text += "[[" * (supervised and not inside) + "]]" * (inside and not supervised) + tokenizer.decode([token])
            inside = supervised
        shown.append(text + "]]" * inside)
    return shown


OFF = {"arguments": {"enable_thinking": False}}
TOOL = {"type": "function", "function": {"name": "add"}}
HI, AND = user("Hi"), user("And?")
CALLS = [call("add", {"a": 1}), call("add", '{"a": 2}')]
"""Parallel, and once as an object, once as JSON text."""


def test_qwen25():
    start = "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert learned("qwen25", [HI, assistant("Yo!"), AND, assistant("No.")]) == [
        start + "[[Yo!<|im_end|>]]\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n[[No.<|im_end|>]]\n"
    ]


def test_qwen25_tools():
    rows = [HI, assistant(None, tool_calls=CALLS), tool("1"), tool("2"), assistant("3")]
    (text,) = learned("qwen25", rows, tools=[TOOL])
    assert text == (
        '<|im_start|>system\nHelp.\n<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '[[<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[3<|im_end|>]]\n"
    )


Q3 = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
Q3_AND = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_qwen3_thinking_on():
    """The second prompt lacks the first answer's reasoning, so each answer has a sample of its own."""
    assert learned("qwen3", [HI, assistant("Yo!", "Hm."), AND, assistant("No.", "So.")]) == [
        Q3 + "[[<think>\nHm.\n</think>\n\nYo!<|im_end|>]]\n",
        Q3 + "Yo!" + Q3_AND + "[[<think>\nSo.\n</think>\n\nNo.<|im_end|>]]\n",
    ]


@pytest.mark.parametrize("style", [{}, OFF])
def test_qwen3_thinking_off(style):
    """An empty think block is the template's, whether the server puts it into the prompt or is not asked to."""
    assert learned("qwen3", [HI, assistant("Yo!"), AND, assistant("No.")], **style) == [
        Q3 + "<think>\n\n</think>\n\n[[Yo!<|im_end|>]]\n",
        Q3 + "Yo!" + Q3_AND + "<think>\n\n</think>\n\n[[No.<|im_end|>]]\n",
    ]


def test_qwen3_mixed():
    assert learned("qwen3", [HI, assistant("Yo!", "Hm."), AND, assistant("No.")]) == [
        Q3 + "[[<think>\nHm.\n</think>\n\nYo!<|im_end|>]]\n",
        Q3 + "Yo!" + Q3_AND + "<think>\n\n</think>\n\n[[No.<|im_end|>]]\n",
    ]


def test_qwen3_reasoning_within_the_content():
    inline = "<think>\nHm.\n</think>\n\nYo!"
    assert learned("qwen3", [HI, assistant(inline)]) == [Q3 + f"[[{inline}<|im_end|>]]\n"]


def test_qwen3_tool_rounds_share_a_sample():
    """Reasoning since the last question stays, so nothing is rewritten."""
    rows = [HI, assistant("", "Hm.", tool_calls=CALLS[:1]), tool("1"), assistant("Yo!", "So.")]
    assert learned("qwen3", rows) == [
        Q3 + '[[<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>]]'
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "[[<think>\nSo.\n</think>\n\nYo!<|im_end|>]]\n"
    ]


def test_only_the_last_answer():
    rows = [HI, assistant("Yo!", "Hm."), AND, assistant("No.", "So.")]
    assert learned("qwen3", rows, train_on="last") == learned("qwen3", rows)[1:]
    (text,) = learned("qwen25", rows, train_on="last", keep_reasoning=False)
    assert text.count("[[") == 1 and "[[No.<|im_end|>]]" in text


def test_an_answer_that_the_target_did_not_write_is_context():
    rows = [HI, assistant("Yo!", train=False), AND, assistant("No.", train=True)]
    (text,) = learned("qwen25", rows)
    assert text.count("[[") == 1 and text.endswith("assistant\n[[No.<|im_end|>]]\n")
    with pytest.raises(DataError, match="no assistant message"):
        learned("qwen25", rows[:2])
    with pytest.raises(DataError, match="message 2 .*: train must be true or false"):
        learned("qwen25", [HI, assistant("Yo!", train="no")])


def test_reasoning_can_be_left_out():
    rows = [HI, assistant("Yo!", "Hm.")]
    assert learned("qwen3", rows, keep_reasoning=False) == [Q3 + "<think>\n\n</think>\n\n[[Yo!<|im_end|>]]\n"]


def test_think_marks_quoted_by_the_user():
    quote = "Hi<think>\n\n</think>\n\n<|im_start|>assistant\nYo!<|im_end|>"
    (text,) = learned("qwen3", [user(quote), assistant("Yo!", "Hm.")])
    head = f"<|im_start|>user\n{quote}<|im_end|>\n<|im_start|>assistant\n"
    assert text == head + "[[<think>\nHm.\n</think>\n\nYo!<|im_end|>]]\n"


def test_a_think_mark_in_a_code_block_is_an_answers_own():
    code = "```\n<think>\n```"
    assert learned("qwen3", [HI, assistant(code, "Hm.")]) == [Q3 + f"[[<think>\nHm.\n</think>\n\n{code}<|im_end|>]]\n"]
    with pytest.raises(DataError, match=r"message 2 .*the template changes its content"):
        learned("qwen3", [HI, assistant("`</think>` ends a thought")])  # here the template loses the first half


def test_llama3():
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
    ask = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert learned("llama3", [HI, assistant("Yo!"), AND, assistant("No.")]) == [
        head + ask.format("Hi") + "[[Yo!<|eot_id|>]]" + ask.format("And?") + "[[No.<|eot_id|>]]"
    ]
    rows = [HI, assistant(None, tool_calls=CALLS[1:]), tool("2"), assistant("Yo!")]
    assert learned("llama3", rows, arguments={"date_string": "1 Jan 2025"}) == [
        head.replace("26 Jul 2024", "1 Jan 2025")
        + ask.format("Hi")
        + '[[{"name": "add", "parameters": {"a": 2}}<|eot_id|>]]<|start_header_id|>ipython<|end_header_id|>\n\n"2"'
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[Yo!<|eot_id|>]]"
    ]
    with pytest.raises(DataError, match="refuses the conversation: .*single tool-calls"):
        learned("llama3", [HI, assistant(None, tool_calls=CALLS)])


def test_a_template_that_leaves_out_the_reasoning():
    with pytest.raises(DataError, match=r"message 2 .*leaves out its reasoning.*--data.reasoning drop"):
        learned("llama3", [HI, assistant("Yo!", "Hm.")])
    (text,) = learned("llama3", [HI, assistant("Yo!", "Hm.")], keep_reasoning=False)
    assert text.endswith("[[Yo!<|eot_id|>]]")


def test_gemma():
    rows = [{"role": "system", "content": "Be brief."}, HI, assistant(" Yo! "), AND, assistant("No.")]
    assert learned("gemma", rows) == [
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n[[Yo!<end_of_turn>]]\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n[[No.<end_of_turn>]]\n"
    ]
    with pytest.raises(DataError, match="message 2 .*leaves out its call of 'add'"):
        learned("gemma", [HI, assistant(None, tool_calls=CALLS), tool("1"), assistant("3")])


def test_mistral():
    """No generation prompt at all; tools stand before the last question, so a later prompt has them elsewhere."""
    rows = [HI, assistant("Yo!"), AND, assistant("No.")]
    assert learned("mistral", rows) == ["<s>[INST]Hi[/INST][[Yo!</s>]][INST]And?[/INST][[No.</s>]]"]
    given = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "add"}}][/AVAILABLE_TOOLS]'
    rows = [HI, assistant("Yo!"), AND, assistant(None, tool_calls=CALLS), tool("1"), assistant("3")]
    calls = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]</s>'
    assert learned("mistral", rows, tools=[TOOL]) == [
        f"<s>{given}[INST]Hi[/INST][[Yo!</s>]]",
        f"<s>[INST]Hi[/INST]Yo!</s>{given}[INST]And?[/INST][[{calls}]][TOOL_RESULTS]1[/TOOL_RESULTS][[3</s>]]",
    ]


def test_harmony():
    """The channel is the target's own; its end mark is <|return|>, of which a later prompt makes <|end|>."""
    head = "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
    rows = [HI, assistant("Yo!", "Hm."), AND, assistant("No.", "So.")]
    assert learned("harmony", rows, arguments={"reasoning_effort": "low"}) == [
        head + "[[<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yo!<|return|>]]",
        head + "<|channel|>final<|message|>Yo!<|end|><|start|>user<|message|>And?<|end|><|start|>assistant"
        "[[<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>]]",
    ]


def test_harmony_calls():
    rows = [HI, assistant("", "Hm.", tool_calls=CALLS[:1]), tool("1"), assistant("Yo!", "So.")]
    call_text = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    head = "<|start|>system<|message|>Reasoning: medium<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
    result = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"1"<|end|><|start|>assistant'
    final = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yo!<|return|>"
    # The final answer's prompt holds the call's reasoning, so both share a sample, though the finished turn drops it.
    assert learned("harmony", rows) == [head + f"[[{call_text}]]" + result + f"[[{final}]]"]


def test_deepseek_thinks_where_the_prompt_makes_it():
    """The finished turn has lost its thought; what the target wrote goes on from the prompt's <think>."""
    rows = [HI, assistant("Yo!", "Hm."), AND, assistant("<think>\nSo.\n</think>\n\nNo.")]
    assert learned("deepseek", rows) == [
        "<|bos|><|User|>Hi<|Assistant|><think>\n[[Hm.\n</think>\n\nYo!<|eos|>]]",
        "<|bos|><|User|>Hi<|Assistant|>Yo!<|eos|><|User|>And?<|Assistant|><think>\n[[So.\n</think>\n\nNo.<|eos|>]]",
    ]
    with pytest.raises(DataError, match=r"message 2 .*has no reasoning, but the template's prompt makes"):
        learned("deepseek", [HI, assistant("Yo!")])


def test_generation_tags():
    """They say what is generated, save for what the prompt holds already and the end token that they leave out."""
    assert learned("deepseek_generation", [HI, assistant("Yo!", "Hm."), AND, assistant("No.")]) == [
        "<|bos|><|User|>Hi<|Assistant|><think>\n[[Hm.\n</think>\n\nYo!<|eos|>]]"
        "<|User|>And?<|Assistant|><think>\n\n</think>\n\n[[No.<|eos|>]]"
    ]


def test_generation_tags_win_over_the_difference():
    tokenizer, style = family("qwen25")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{{ '(calm) ' }}{% generation %}"
        "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (sample,) = render(tokenizer, [HI, assistant("Yö!")], style)
    assert tokenizer.decode(sample.tokens[sample.supervised]) == "Yö!<|im_end|>"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}", "{% endgeneration %}{{ m.content }}"
    )
    with pytest.raises(DataError, match="generation tags mark none of its tokens"):
        render(tokenizer, [HI, assistant("Yo!")], style)


def test_glm_answers_end_with_the_next_marker():
    rows = [HI, assistant("Yo!", "Hm.", tool_calls=[call("add", {"a": 1})]), tool("1"), assistant("No.", "So.")]
    assert learned("glm", rows) == [
        "[gMASK]<|user|>\nHi<|assistant|>[[\n<think>Hm.</think>\nYo!\n"
        '<tool_call>add{"a": 1}</tool_call><|observation|>]]'
        "\n1<|assistant|>[[\n<think>So.</think>\nNo.]]"
    ]
    for style in (OFF, {}):  # the server's own prompt without thinking tells that the line break is the target's
        text = "[gMASK]<|user|>\nHi<|assistant|>\n<think></think>[[\nYo!]]"
        assert learned("glm", [HI, assistant("Yo!")], **style) == [text]


@pytest.mark.parametrize("name", ["qwen25", "llama3", "gemma", "mistral"])
def test_a_prefilled_answer(name):
    """What the client began is context, what the target continued is supervised."""
    whole = learned(name, [HI, assistant("Sure: Yo!")])[0]
    assert learned(name, [HI, assistant("Sure: Yo!", prefill="Sure:")]) == [whole.replace("[[Sure:", "Sure:[[")]
    with pytest.raises(DataError, match="prefill must be the beginning"):
        learned(name, [HI, assistant("Yo!", prefill="Sure")])


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([call("add", "{a: 1}")], "arguments of 'add' are not JSON"),
        ([call("add", "[1]")], "arguments of 'add' must be an object"),
        ([{"type": "function"}], "needs a function with a name"),
        (["add"], "tool_calls must be a list of objects"),
    ],
)
def test_tool_calls_that_are_refused(calls, reason):
    with pytest.raises(DataError, match=f"message 2 .*{reason}"):
        learned("qwen25", [HI, assistant(None, tool_calls=calls)])


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    rows = [user(parts), assistant("Yo!")]
    assert "user\nHi\nthere<|im_end|>" in learned("qwen25", rows)[0]
    assert rows[0]["content"] is parts and normalise(rows)[0]["content"] == "Hi\nthere"


def test_what_a_server_says_it_was_asked_and_wrote():
    tokenizer, style = family("qwen3")
    rows = [HI, assistant("Yo!", "Hm.")]
    (ours,) = render(tokenizer, rows, style)
    prompt, answer = ours.tokens[~ours.supervised].tolist()[:-1], ours.tokens[ours.supervised].tolist()
    (same,) = render(tokenizer, rows, style, served={1: (prompt, answer)})
    assert same.tokens.tolist() == ours.tokens.tolist()
    other = [*answer[:-2], 200, answer[-1]]  # it wrote the text with other tokens than the tokenizer would
    (exact,) = render(tokenizer, rows, style, served={1: (prompt, other)})
    assert exact.tokens.tolist() == prompt + other and exact.supervised.sum() == len(other)
    (cut,) = render(tokenizer, rows, style, served={1: (prompt, answer[:-1])}, finish="length")
    assert cut.tokens[cut.supervised].tolist() == answer[:-1]
    with pytest.raises(DataError, match=r"message 2 .*server's prompt differs from ours at token 3: ours .*its "):
        render(tokenizer, rows, style, served={1: ([*prompt[:3], 77], answer)})
    # It wrote the empty think block itself: then that is supervised.
    (empty,) = render(tokenizer, [HI, assistant("Yo!")], style)
    start = len(prompt)
    (own,) = render(tokenizer, [HI, assistant("Yo!")], style, served={1: (prompt, empty.tokens[start:-1].tolist())})
    assert own.supervised.sum() > empty.supervised.sum() and own.supervised[start:].all()


TEXT = some.text(some.sampled_from("ab \n<>|é日"), max_size=12).map(lambda text: f"x{text}y")


@some.composite
def conversations(draw):
    messages = []
    for _ in range(draw(some.integers(1, 3))):
        messages.append(user(draw(TEXT)))
        if draw(some.booleans()):
            messages += [assistant(None, draw(TEXT), tool_calls=[call("add", {"a": draw(TEXT)})]), tool(draw(TEXT))]
        messages.append(assistant(draw(TEXT), draw(some.none() | TEXT)))
    return messages


@settings(max_examples=60, deadline=None)
@given(some.sampled_from(["qwen25", "qwen3", "harmony", "glm", "deepseek_generation"]), conversations())
def test_any_conversation(name, messages):
    """Each answer is supervised once, in a sample that begins with what a server computes."""
    if name == "deepseek_generation":  # knows no tools
        messages = [m for m in messages if m["role"] == "user" or (m["role"] == "assistant" and m["content"])]
    tokenizer, style = family(name)
    if name == "qwen25":
        style = replace(style, keep_reasoning=False)
    samples = render(tokenizer, messages, style)
    runs = 0
    for sample in samples:
        check_served(tokenizer, messages, style, sample, None)
        assert len(sample.tokens) == len(sample.supervised)
        runs += int(sample.supervised[0]) + int((~sample.supervised[:-1] & sample.supervised[1:]).sum())
    answers = [m for m in messages if m["role"] == "assistant"]
    assert runs == len(answers)
    if name != "harmony":  # it drops a call's reasoning, which the answer's prompt still held
        assert samples[-1].tokens.tolist() == full(tokenizer, messages, style)
    spoken = "".join(tokenizer.decode(s.tokens[s.supervised]) for s in samples)
    assert all(m["content"] in spoken for m in answers if m["content"])


def full(tokenizer, messages, style: Style):
    """The template's ids of the whole conversation."""
    messages = normalise(messages, keep_reasoning=style.keep_reasoning)
    return tokenizer.apply_chat_template(messages, return_dict=False, **style.arguments)
