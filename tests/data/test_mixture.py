"""Several prepared sets as one: which rows an epoch sees, whatever the folders' names and order."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.config import DataOptions, OptimOptions, PackOptions
from draftsmith.data import shards
from draftsmith.data.loader import PackBuilder, pack_stream
from draftsmith.data.mixture import open_training_set
from draftsmith.data.plan import Plan, make_plan
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.prompts import Prompt
from draftsmith.errors import DataError, UserError
from draftsmith.telemetry import Console
from draftsmith.train import train
from tests.conftest import with_options
from tests.handmade import block_shape
from tests.tiny import tiny_tokenizer

PACK = PackOptions(tokens=400, anchors=60, anchors_per_document=8, anchor_density=0.5)


def make_set(folder, name: str, rows: list[dict], tokenizer=None) -> str:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer or tiny_tokenizer()
    options = DataOptions(conversations=str(source), prepared=str(folder / name))
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lambda line: None)
    return options.prepared


def rows_of(name: str, num: int, *, length: int = 8, tags: tuple[str, ...] = ()) -> list[dict]:
    return [
        {
            "id": f"{name} {i}",
            "messages": [{"role": "user", "content": f"{name}{i}"}, {"role": "assistant", "content": "a" * length}],
            "tags": list(tags) if i % 2 else [],
        }
        for i in range(num)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sets")
    return {
        "chat": make_set(folder, "chat", rows_of("chat", 30, tags=("odd",))),
        "code": make_set(folder, "code", rows_of("code", 12, length=20, tags=("odd", "code"))),
        "long": make_set(folder, "long", rows_of("long", 3, length=1000)),
    }


def plan_of(prompts: list[Prompt] = (), *, pack: PackOptions = PACK, epochs: int = 2, **data) -> Plan:
    return make_plan(DataOptions(**data), pack, OptimOptions(epochs=epochs), 0, list(prompts), tiny_tokenizer())


def seen(plan: Plan, epoch: int) -> dict[str, int]:
    """Visits of each row, by its id."""
    counts: dict[str, int] = {}
    for row in plan.schedule.rows(epoch):
        name = plan.dataset[row].id
        counts[name] = counts.get(name, 0) + 1
    return counts


def test_one_folder_is_what_it_was(folders):
    alone, mixed = plan_of(prepared=folders["chat"]), plan_of(mix=(folders["chat"],))
    assert alone.fingerprint == mixed.fingerprint == alone.dataset.parts[0].dataset.fingerprint
    assert alone.schedule.mix is None and alone.remarks == ()
    assert [p.tolist() for p in alone.schedule.packs(1)] == [p.tolist() for p in mixed.schedule.packs(1)]


def test_weights_say_how_often_rows_are_seen(folders):
    plan = plan_of(mix=(f"{folders['chat']}=0.5", f"{folders['code']}=3"), epochs=6)
    for epoch in range(6):
        counts = seen(plan, epoch)
        assert [counts[f"code {i}"] for i in range(12)] == [3] * 12
        assert all(counts[name] == 1 for name in counts if name.startswith("chat"))
    total = [sum(seen(plan, epoch).get(f"chat {i}", 0) for epoch in range(6)) for i in range(30)]
    assert total == [3] * 30
    assert any("weight 3: 12 rows, 36 visits" in line for line in plan.remarks)


def test_the_order_does_not_depend_on_how_folders_are_named(folders, tmp_path):
    moved = tmp_path / "elsewhere=1"
    moved.symlink_to(folders["code"])
    one = plan_of(mix=(f"{folders['chat']}=0.5", folders["code"]))
    other = plan_of(mix=(f"{moved}=1", f"{folders['chat']}=0.5"))
    assert one.fingerprint == other.fingerprint
    builders = [PackBuilder(plan.dataset, PACK, block_shape(4), 0) for plan in (one, other)]
    plans = zip(builders, (one, other), strict=True)
    ids = [
        [pack.sample_ids for pack in pack_stream(builder, plan.schedule, plan.schedule.places(), 0)]
        for builder, plan in plans
    ]
    assert ids[0] == ids[1] and len(ids[0]) > 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts the machine's cores
def test_packs_do_not_depend_on_workers(folders):
    plan = plan_of(mix=(f"{folders['chat']}=1.5", folders["code"]), caps=("code=5",))
    builder = PackBuilder(plan.dataset, PACK, block_shape(4), 0)
    streams = [list(pack_stream(builder, plan.schedule, plan.schedule.places(), workers)) for workers in (0, 2)]
    assert len(streams[0]) == len(streams[1]) > 3
    for one, other in zip(*streams, strict=True):
        assert (one.sample_ids, one.samples, one.index) == (other.sample_ids, other.samples, other.index)
        assert torch.equal(one.blocks.anchor, other.blocks.anchor) and torch.equal(one.tokens, other.tokens)


def test_the_order_does_not_depend_on_how_rows_lie_in_files(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 400)
    monkeypatch.setattr(shards, "BATCH", 3)
    other = make_set(tmp_path, "chat", rows_of("chat", 30, tags=("odd",)))
    plans = [plan_of(mix=(folder, f"{folders['code']}=0.5")) for folder in (folders["chat"], other)]
    files = [plan.dataset.parts[[p.weight for p in plan.dataset.parts].index(1)].dataset.manifest for plan in plans]
    assert [sum(name.endswith(".arrow") for name in one["files"]) > 2 for one in files] == [False, True]
    assert [p.tolist() for p in plans[0].schedule.packs(1)] == [p.tolist() for p in plans[1].schedule.packs(1)]


def test_rows_keep_their_identity_and_content(folders):
    dataset = open_training_set(DataOptions(mix=(folders["chat"], f"{folders['code']}=2")), 400)
    assert len(dataset) == 42 and len(dataset.weights()) == 42
    for row, name in enumerate(dataset.ids()):
        sample = dataset[row]
        assert sample.id == name
        assert (len(sample.tokens), int(sample.supervised.sum()) - 1) == (
            dataset.lengths[row],
            dataset.legal_counts[row],
        )
        assert dataset.tagged("odd")[row] == ("odd" in sample.tags)
    assert dataset.count_token(2) == sum(int((dataset[row].tokens == 2).sum()) for row in range(42))


def test_caps_by_tag(folders):
    plan = plan_of(mix=(folders["chat"], folders["code"]), caps=("odd=5", "code=40tokens"))
    odd = [name for name in seen(plan, 0) if int(name.split()[1]) % 2]
    assert len(odd) <= 5 and len(seen(plan, 0)) >= 21
    assert seen(plan, 0) != seen(plan, 1)
    assert any(line.startswith("cap: odd, 5 rows an epoch: ") and " of 21 visits" in line for line in plan.remarks)
    assert not any("nothing away" in line for line in plan.remarks)


def test_a_cap_without_effect_is_said(folders):
    plan = plan_of(prepared=folders["chat"], caps=("odd=15",))
    assert any("15 of 15 visits" in line and line.endswith("so it takes nothing away") for line in plan.remarks)


def test_a_cap_of_one_folder(folders):
    plan = plan_of(prepared=folders["chat"], caps=("odd=4",))
    assert len(seen(plan, 0)) == 15 + 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prepared": "a", "mix": ("b",)}, "both given"),
        ({"mix": ("CHAT=0",)}, "greater than 0"),
        ({"mix": ("CHAT=-1",)}, "greater than 0"),
        ({"mix": ("CHAT=inf",)}, "greater than 0"),
        ({"mix": ("=2",)}, "give FOLDER"),
        ({"mix": ("CHAT", "CHAT=2")}, "the same rows"),
        ({"prepared": "CHAT", "caps": ("odd",)}, "TAG=ROWS"),
        ({"prepared": "CHAT", "caps": ("odd=0",)}, "TAG=ROWS"),
        ({"prepared": "CHAT", "caps": ("even=3",)}, "there are: odd"),
        ({"prepared": "CHAT", "split_context": 3}, "not 'split'"),
        ({"prepared": "CHAT", "overlap": "drop"}, "names no prompts"),
        ({"mix": ("CHAT", "CODE"), "caps": ("odd=1tokens", "code=1")}, None),
    ],
)
def test_options_that_are_refused(folders, change, said):
    change = {
        key: tuple(v.replace("CHAT", folders["chat"]).replace("CODE", folders["code"]) for v in value)
        if isinstance(value, tuple)
        else folders["chat"]
        if value == "CHAT"
        else value
        for key, value in change.items()
    }
    if said is None:
        assert len(seen(plan_of(**change), 0)) == 21
        return
    with pytest.raises(UserError, match=said):
        plan_of(**change)


def test_folders_of_different_tokenizers_are_refused(folders, tmp_path):
    other = tiny_tokenizer()
    other.chat_template = other.chat_template.replace("'<|im_end|>' + '\\n'", "'<|im_end|>'")
    assert other.chat_template != tiny_tokenizer().chat_template
    strange = make_set(tmp_path, "strange", rows_of("s", 3), other)
    with pytest.raises(UserError, match="different tokenizers"):
        plan_of(mix=(folders["chat"], strange))


def test_ids_in_several_folders_are_said(folders, tmp_path):
    again = make_set(tmp_path, "again", rows_of("chat", 3, length=9))
    assert any("3 ids occur in more than one folder" in line for line in plan_of(mix=(folders["chat"], again)).remarks)


# Long rows


def test_rows_longer_than_a_pack_are_split(folders):
    """Each supervised token once, whether `prepare` or the loader splits."""
    whole = open_training_set(DataOptions(prepared=folders["long"]), 2_000)
    plan = plan_of(mix=(folders["chat"], folders["long"]), overlong="split", split_context=50)
    assert plan.schedule.lengths.max() == 400
    pieces = [plan.dataset[row] for row in range(len(plan.dataset)) if plan.dataset[row].id.startswith("long")]
    assert [piece.id for piece in pieces[:3]] == [f"long {i}@0" for i in range(3)]
    for row in range(3):
        mine = [piece for piece in pieces if piece.id.startswith(f"long {row}@")]
        supervised = np.concatenate([piece.tokens[piece.supervised] for piece in mine])
        assert supervised.tolist() == whole[row].tokens[whole[row].supervised].tolist()
        assert all(len(piece.tokens) <= 400 and not piece.supervised[:50].any() for piece in mine[1:])
    assert sum(seen(plan, 0).values()) == len(plan.dataset) == 30 + len(pieces)
    assert any(f"3 samples are longer than pack.tokens = 400 and make {len(pieces)} pieces" in x for x in plan.remarks)


def test_prepare_and_train_split_alike(folders, tmp_path):
    """The same samples, whether a conversation is split at max_length or a sample at pack.tokens."""
    options = DataOptions(
        conversations=str(Path(folders["long"]).with_suffix(".jsonl")),
        prepared=str(tmp_path / "split"),
        max_length=400,
        overlong="split",
        split_context=50,
    )
    tokenizer = tiny_tokenizer()
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lambda line: None)
    early = open_training_set(DataOptions(prepared=options.prepared), 400)
    late = open_training_set(DataOptions(prepared=folders["long"], overlong="split", split_context=50), 400)
    samples = [{one.id: one for one in (some[row] for row in range(len(some)))} for some in (early, late)]
    assert samples[0].keys() == samples[1].keys() and len(samples[0]) == len(early) == len(late) > 6
    for name, one in samples[0].items():
        assert one.tokens.tolist() == samples[1][name].tokens.tolist()
        assert one.supervised.tolist() == samples[1][name].supervised.tolist()
    assert [late.id(row) for row in range(len(late))] == [late[row].id for row in range(len(late))]


def test_pieces_of_a_document_are_seen_together(folders):
    plan = plan_of(mix=(folders["chat"], f"{folders['long']}=0.5"), overlong="split", epochs=4)
    for epoch in range(4):
        documents = [name.split("@")[0] for name in seen(plan, epoch)]
        whole = [plan.dataset[row].id.split("@")[0] for row in range(len(plan.dataset))]
        assert all(documents.count(name) == whole.count(name) for name in set(documents))


def test_another_split_is_other_data(folders):
    prints = {
        plan_of(prepared=folders["long"], overlong="split", split_context=context).fingerprint for context in (50, 60)
    }
    assert len(prints | {plan_of(prepared=folders["long"], pack=replace(PACK, tokens=2_000)).fingerprint}) == 3


def test_a_long_row_is_refused_unless_told(folders):
    with pytest.raises(DataError, match="set data.overlong to 'cut' or 'split'"):
        plan_of(prepared=folders["long"])


# Text shared with evaluation prompts


def ask(text: str) -> Prompt:
    return Prompt(id=text, messages=({"role": "user", "content": text},))


def test_shared_text_is_found_and_left_out(tmp_path):
    shared = "thirteen bytes and more"
    rows = [*rows_of("clean", 10), *rows_of("dirty", 2)]
    rows[10]["messages"][0]["content"] = f"before {shared} after"
    rows[11]["messages"][1]["content"] = shared[:13]
    folder = make_set(tmp_path, "some", rows)
    prompts = [ask(shared), ask("another prompt, in no row"), ask("short")]
    warned, dropped, ignored = (plan_of(prompts, prepared=folder, overlap=how) for how in ("warn", "drop", "ignore"))
    assert (
        len(warned.warnings) == 1 and "2 of 12 training rows share 13 tokens in a row with 1 of 3" in warned.warnings[0]
    )
    assert "(dirty 0, dirty 1)" in warned.warnings[0] and "data.overlap = 'drop'" in warned.warnings[0]
    assert "1 of 3 evaluation prompts have less than 13 tokens" in warned.remarks[0]
    assert len(seen(warned, 0)) == len(seen(ignored, 0)) == 12 and not ignored.warnings and not ignored.remarks
    assert set(seen(dropped, 0)) == {f"clean {i}" for i in range(10)}
    assert "they are left out" in dropped.warnings[0]
    assert warned.fingerprint == ignored.fingerprint != dropped.fingerprint


# Training


def test_a_mixture_trains_and_another_one_is_no_resume(recipe, folders, capsys):
    mixed = with_options(recipe, "data", prepared="", mix=(folders["chat"], f"{folders['code']}=2"), caps=("code=5",))
    mixed = with_options(mixed, "pack", tokens=400)
    train(mixed, Console())
    assert "weight 2: 12 rows" in capsys.readouterr().out
    with pytest.raises(UserError, match="data.mix"):
        train(with_options(mixed, "data", mix=(folders["chat"], f"{folders['code']}=3")), Console())
