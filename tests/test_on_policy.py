"""Whether the target wrote the answers of a prepared set."""

import json

import numpy as np
import pytest
import torch

from draftsmith import on_policy
from draftsmith.cli import main
from draftsmith.config import DataOptions, TargetOptions
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.on_policy import Agreement, check_target, describe_agreement, target_choices
from draftsmith.targets.hf import load_target
from draftsmith.types import Sample
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def target(world):
    return load_target(TargetOptions(path=str(world / "target"), layer_ids=(0, 2)), torch.device("cpu"))


@pytest.fixture(scope="module")
def foreign(world, tmp_path_factory):
    """Half of the rows as the target wrote them, half with an answer of another hand."""
    folder = tmp_path_factory.mktemp("foreign")
    rows = [json.loads(line) for line in (world / "conversations.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        if number % 2:
            row["messages"][-1]["content"] = "of another hand"
        row["tags"], row["finish"] = ["theirs" if number % 2 else "ours"], "length" if number % 2 else row.get("finish")
        row["id"] = str(number)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = DataOptions(conversations=str(folder / "rows.jsonl"), prepared=str(folder / "prepared"))
    tokenizer = tiny_tokenizer()
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lambda line: None)
    return folder


def test_the_targets_own_greedy_answers_agree(world, target):
    found = check_target(open_prepared(world / "prepared"), target, 100, lambda line: None)
    assert found[""].share == 1 and found[""].rows == 24
    assert found["even"] + found["odd"] == found[""]
    assert describe_agreement(found)[1] == []


def test_answers_of_another_hand_are_told_by_tag(foreign, target):
    found = check_target(open_prepared(foreign / "prepared"), target, 100, lambda line: None)
    assert found["ours"].share == 1 and found["theirs"].share < 0.5
    lines, warnings = describe_agreement(found)
    assert len(lines) == 3 and lines[1].startswith("  ours: 100.0% of ")
    assert any("tagged 'theirs'" in line and "draftsmith regenerate" in line for line in warnings)
    assert not any("'ours'" in line for line in warnings)


def test_choices_are_those_of_one_forward_pass(target, monkeypatch):
    """In chunks of 7, for supervision that begins with the first token and one that ends before the last."""
    monkeypatch.setattr(on_policy, "CHUNK", 7)
    tokens = np.random.default_rng(0).integers(3, 200, 40)
    supervised = np.arange(40) % 3 == 0
    places, choices = target_choices(target, Sample(id="row", tokens=tokens, supervised=supervised))
    logits = target.model(torch.from_numpy(tokens)[None]).logits[0]
    assert places.tolist() == list(range(3, 40, 3))
    assert choices.tolist() == logits.argmax(-1)[places - 1].tolist()


def test_a_row_without_supervision_counts_nothing(target):
    places, choices = target_choices(target, Sample(id="row", tokens=np.arange(9), supervised=np.zeros(9, bool)))
    assert (len(places), len(choices)) == (0, 0)
    assert Agreement().share == 0


def test_fewer_rows_are_the_same_ones_each_time(foreign, target):
    dataset = open_prepared(foreign / "prepared")
    some = [check_target(dataset, target, 5, lambda line: None) for _ in range(2)]
    assert some[0] == some[1] and some[0][""].rows == 5


def test_the_verb_prints_and_warns(world, foreign, capsys):
    words = ["prepare", "--target.path", str(world / "target"), "--data.conversations", str(foreign / "rows.jsonl")]
    main([*words, "--data.prepared", str(foreign / "prepared"), "--check_target", "24", "--device", "cpu"])
    out = "".join(capsys.readouterr())
    assert "on policy: the target's own first choice equals" in out and "tagged 'theirs'" in out
    assert "next: draftsmith preview" in out
    with pytest.raises(SystemExit):
        main([*words, "--data.prepared", str(foreign / "prepared"), "--check_target", "-1"])
    assert "check_target is -1" in capsys.readouterr().err
