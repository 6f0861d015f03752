"""The prepared folder: what is counted, refused, reused and rebuilt, and that a kill never leaves half of one."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest

from draftsmith.config import DataOptions
from draftsmith.data import prepare as module
from draftsmith.data import shards, store
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.errors import DataError, UserError
from tests.tiny import tiny_tokenizer


def row(question="Hi", answer="Yo!", **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


ROWS = [row(f"question {i}", f"answer {i}", tags=["even" if i % 2 == 0 else "odd"]) for i in range(5)]


def write(options, rows):
    with open(options.conversations, "wb") as file:
        file.writelines(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in rows)


@pytest.fixture
def options(tmp_path):
    options = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / "out"))
    write(options, ROWS)
    return options


def run(options, tokenizer=None, **more):
    """The manifest and the reported lines."""
    lines = []
    tokenizer = tokenizer or tiny_tokenizer()
    return prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lines.append, **more), lines


def test_round_trip(options):
    manifest, _ = run(options)
    dataset = open_prepared(options.prepared)
    tokenizer = tiny_tokenizer()
    assert len(dataset) == len(ROWS) == len(dataset.ids) == len(dataset.lengths)
    for index, original in enumerate(ROWS):
        sample = dataset[index]
        text = tokenizer.apply_chat_template(original["messages"], tokenize=False)
        assert tokenizer.decode(sample.tokens) == text
        assert tokenizer.decode(sample.tokens[sample.supervised]) == f"answer {index}<|im_end|>"
        assert (sample.tokens.dtype, sample.supervised.dtype) == (np.int64, bool)
        assert sample.tokens.flags.writeable and sample.supervised.flags.writeable
        assert sample.id == dataset.ids[index] and len(sample.id) == 16
        assert sample.tags == tuple(original["tags"])
        assert dataset.lengths[index] == len(sample.tokens)
        assert dataset.legal_counts[index] == sample.supervised.sum() - 1
    assert dataset.lengths.dtype == dataset.legal_counts.dtype == np.int64
    assert dataset.manifest == manifest and dataset.fingerprint == manifest["content_hash"]
    for outside in (len(ROWS), -1):
        with pytest.raises(IndexError):
            dataset[outside]


def test_manifest(options):
    manifest, lines = run(options)
    dataset = open_prepared(options.prepared)
    assert manifest["schema"] == store.SCHEMA
    assert manifest["counts"] == {
        "rows_in": 5,
        "kept": 5,
        "extra": 0,
        "dropped": {},
        "bad": 0,
        "held_out": 0,
        "cut": 0,
        "tokens": int(dataset.lengths.sum()),
        "supervised": 5 * len("answer 0?"),
        "legal": 5 * len("answer 0"),
        "longest": int(dataset.lengths.max()),
        "tags": {"even": 3, "odd": 2},
        "modes": {},
    }
    with open(options.conversations, "rb") as file:
        assert manifest["inputs"]["conversations"] == hashlib.sha256(file.read()).hexdigest()
    tokenizer = tiny_tokenizer()
    assert manifest["inputs"]["tokenizer"] == tokenizer_fingerprint(tokenizer)
    assert manifest["inputs"]["chat template"] == hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    assert "5 rows" in lines[-1]


def test_several_record_batches(options, monkeypatch):
    rows = [row(f"q{i}", "a" * (i % 7 + 1)) for i in range(23)]
    write(options, rows)
    run(options)
    whole = [open_prepared(options.prepared)[i] for i in range(23)]
    legal = open_prepared(options.prepared).legal_counts
    monkeypatch.setattr(shards, "BATCH", 4)
    monkeypatch.setattr(module, "PROGRESS", 10)
    again = replace(options, prepared=options.prepared + "2")
    manifest, lines = run(again)
    assert [line.split(",")[0] for line in lines[1:-1]] == ["10 rows read", "20 rows read"]
    dataset = open_prepared(again.prepared)
    assert len(dataset._columns.tokens.values) > 3
    for index in np.random.default_rng(0).permutation(23):
        np.testing.assert_array_equal(dataset[index].tokens, whole[index].tokens)
        np.testing.assert_array_equal(dataset[index].supervised, whole[index].supervised)
    assert legal.tolist() == dataset.legal_counts.tolist() == [i % 7 + 1 for i in range(23)]
    assert manifest["content_hash"] == open_prepared(options.prepared).fingerprint


def test_gzip_gives_the_same_rows(options, tmp_path):
    packed = replace(options, conversations=str(tmp_path / "c.jsonl.gz"), prepared=str(tmp_path / "packed"))
    with open(options.conversations, "rb") as file, open(packed.conversations, "wb") as target:
        target.write(gzip.compress(file.read()))
    assert run(packed)[0]["content_hash"] == run(options)[0]["content_hash"]


def test_datasets_reads_the_folder(options):
    import datasets

    run(options)
    loaded = datasets.load_from_disk(options.prepared)
    assert loaded.column_names == ["id", "tokens", "supervised", "tags", "num_legal"]
    assert loaded[1]["tokens"] == open_prepared(options.prepared)[1].tokens.tolist()


def test_ids_do_not_depend_on_the_order(options, tmp_path):
    other = replace(options, conversations=str(tmp_path / "r.jsonl"), prepared=str(tmp_path / "reversed"))
    write(other, ROWS[::-1])
    run(options), run(other)
    first, second = open_prepared(options.prepared), open_prepared(other.prepared)
    assert first.ids == second.ids[::-1] and len(set(first.ids)) == 5
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], r"c\.jsonl holds no conversation"),
        ([b"\n\n"], r"c\.jsonl holds no conversation"),
        ([ROWS[0], b"\n", b"oh no\n"], r"c\.jsonl, line 3: not JSON"),
        ([ROWS[0], {"text": "x"}], r"c\.jsonl, line 2: expected an object"),
        ([ROWS[0], {"messages": ROWS[0]["messages"][::-1]}], r"c\.jsonl, line 2: roles out of order: message 1"),
        ([row(id="a"), ROWS[1], row("Ho", id="a")], r"c\.jsonl, line 3: id 'a' is row 1's too"),
        ([row(), row(tags=["x"])], r"c\.jsonl, line 2: id '[0-9a-f]{16}' is row 1's too"),
        ([row(answer="")], r"no row has two supervised tokens"),
        ([row("x" * 3000, "ab")], r"only 3 of \d+ tokens are supervised, less than 1%"),
    ],
)
def test_refused(options, rows, reason):
    write(options, rows)
    with pytest.raises(DataError, match=reason) as caught:
        run(options)
    assert caught.value.exit_code == 4
    assert os.listdir(os.path.dirname(options.prepared)) == ["c.jsonl"]


def test_a_useless_template_names_line_and_turn(options):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(DataError, match=r"c\.jsonl, line 1: message 2 \(assistant\).*is not a prefix"):
        run(options, tokenizer)


def test_bad_options(options):
    with pytest.raises(DataError, match="nowhere.jsonl: no such file"):
        run(replace(options, conversations="nowhere.jsonl"))
    for missing in ("conversations", "prepared"):
        with pytest.raises(UserError, match="needs both"):
            run(replace(options, **{missing: ""}))
    with pytest.raises(UserError, match="max_length is 1"):
        run(replace(options, max_length=1))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        run(options, tokenizer)


def test_overlong_is_refused_or_cut(options):
    write(options, [row(), row("Ho", "long " * 20), row("question " * 20, "lost")])
    options = replace(options, max_length=60)
    with pytest.raises(DataError, match=r"line 2: \d+ tokens, max_length is 60; raise --data.max_length"):
        run(options)
    manifest, lines = run(replace(options, overlong="cut"))
    assert (manifest["counts"]["kept"], manifest["counts"]["cut"], manifest["counts"]["longest"]) == (2, 1, 60)
    assert manifest["counts"]["dropped"] == {"nothing supervised within max_length": 1}
    assert "1 cut" in lines[-1] and "1 dropped (nothing supervised within max_length)" in lines[-1]
    sample = open_prepared(options.prepared)[1]
    assert len(sample.tokens) == 60 and sample.supervised[-1]


def test_overlong_is_split(options):
    """Each supervised token once, with context before it, under an id that says where the piece begins."""
    write(options, [row(), row("Ho", "long " * 40, id="talk"), row("question " * 20, "found", id="ask")])
    whole = replace(options, prepared=options.prepared + " whole")
    run(whole), run(options := replace(options, max_length=60, overlong="split", split_context=20))
    dataset, documents = open_prepared(options.prepared), open_prepared(whole.prepared)
    samples = [dataset[i] for i in range(len(dataset))]
    counts = dataset.manifest["counts"]
    assert (counts["cut"], counts["extra"], counts["longest"]) == (0, len(samples) - 3, 60)
    for document in (documents[i] for i in (1, 2)):
        pieces = [one for one in samples if one.id.split("@")[0] == document.id]
        learned = np.concatenate([one.tokens[one.supervised] for one in pieces])
        assert learned.tolist() == document.tokens[document.supervised].tolist()
        for number, piece in enumerate(pieces):
            first = int(piece.id.split("@")[1])
            assert not piece.supervised[: 20 if number else 0].any() and piece.supervised[20:].any()
            begin = max(0, first - 20) if first else 0
            assert piece.tokens.tolist() == document.tokens[begin : begin + 60].tolist()
    assert [one.id for one in samples][:2] == [documents.ids[0], "talk@0"]
    assert len([one for one in samples if one.id.startswith("ask")]) == 1  # no piece for the prompt alone
    with pytest.raises(UserError, match="data.split_context is 59"):
        run(replace(options, split_context=59))


def test_a_row_that_just_fits(options):
    longest = run(options)[0]["counts"]["longest"]
    assert run(replace(options, max_length=longest))[0]["counts"]["cut"] == 0
    with pytest.raises(DataError, match="max_length is"):
        run(replace(options, max_length=longest - 1))


def test_nothing_supervised_is_dropped_and_counted(options):
    write(options, [*ROWS, row("Ho", "", finish="length"), row("He", "", finish="length")])
    manifest, lines = run(options)
    assert manifest["counts"]["dropped"] == {"nothing supervised": 2}
    assert (manifest["counts"]["rows_in"], manifest["counts"]["kept"]) == (7, 5)
    assert "2 dropped (nothing supervised)" in lines[-1]


def test_the_fingerprint_covers_supervision_and_tags(options):
    prints = set()
    for more in ({}, {"finish": "length"}, {"tags": ["x"]}):
        write(options, [row(id="a", **more)])
        prints.add(run(options)[0]["content_hash"])
    assert len(prints) == 3


def test_a_cut_answer_loses_its_end(options):
    write(options, [row(finish="length"), row("Ho", finish="stop")])
    run(options)
    cut, whole = (open_prepared(options.prepared)[i] for i in range(2))
    assert tiny_tokenizer().decode(cut.tokens[cut.supervised]) == "Yo!"
    assert tiny_tokenizer().decode(whole.tokens[whole.supervised]) == "Yo!<|im_end|>"


def test_exact_duplicates_are_dropped_and_counted(options):
    write(options, [row(), row("Ho", id="a"), row(), row("Ho", id="a"), row("Ho", id="b")])
    manifest, lines = run(options)
    assert manifest["counts"]["dropped"] == {"exact duplicate": 2}
    assert open_prepared(options.prepared).ids[1:] == ["a", "b"]
    assert "2 dropped (exact duplicate)" in lines[-1]


def test_keys_without_effect_are_reported(options):
    write(options, [row(), row("Ho", source="web")])
    manifest, lines = run(options)
    assert manifest["ignored_keys"] == {"source": 1}
    assert any("'source' of 1 rows means nothing here" in line for line in lines)


def test_reuse(options):
    first, _ = run(options)
    stamp = os.stat(os.path.join(options.prepared, store.MANIFEST)).st_mtime_ns
    second, lines = run(replace(options, workers=3))
    assert second == first and len(lines) == 1
    assert lines[0].startswith("reusing") and "5 rows" in lines[0]
    assert os.stat(os.path.join(options.prepared, store.MANIFEST)).st_mtime_ns == stamp


def change_conversations(options, tokenizer):
    # The same size and time of change, so that only the content tells.
    stamp = os.stat(options.conversations)
    write(options, [row("question 0", "ANSWER 0", tags=["even"]), *ROWS[1:]])
    os.utime(options.conversations, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert os.stat(options.conversations).st_size == stamp.st_size
    return options, {}


def change_tokenizer(options, tokenizer):
    tokenizer.add_tokens(["answer"])
    return options, {}


def change_template(options, tokenizer):
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    return options, {}


def change_schema(options, tokenizer):
    path = os.path.join(options.prepared, store.MANIFEST)
    with open(path) as file:
        manifest = json.load(file)
    with open(path, "w") as file:
        json.dump(manifest | {"schema": 0}, file)
    return options, {}


def change_file(options, tokenizer):
    with open(os.path.join(options.prepared, "data-00000.arrow"), "ab") as file:
        file.write(b"x")
    return options, {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_conversations, ": conversations changed$"),
        (change_tokenizer, ": tokenizer changed$"),
        (change_template, ": tokenizer changed; chat template changed$"),
        (lambda options, _: (replace(options, max_length=100), {}), r": max_length changed \(4096 -> 100\)$"),
        (lambda options, _: (replace(options, overlong="cut"), {}), r": overlong changed \(refuse -> cut\)$"),
        (lambda options, _: (options, {"end_ids": [0, 2]}), ": end-of-turn tokens changed$"),
        (change_schema, ": its format is version 0, now 3$"),
        (change_file, r": data-00000\.arrow is damaged or missing"),
    ],
)
def test_every_cache_miss_says_why(options, change, reason):
    run(options)
    tokenizer = tiny_tokenizer()
    options, more = change(options, tokenizer)
    _, lines = run(options, tokenizer, **more)
    assert lines[0].startswith("rebuilding") and lines[-1].startswith("prepared")

    assert re.search(reason, lines[0]), lines[0]
    assert run(options, tokenizer, **more)[1][0].startswith("reusing")
    assert sorted(os.listdir(os.path.dirname(options.prepared))) == ["c.jsonl", "out"]


def test_tokenizer_fingerprint():
    base = tokenizer_fingerprint(tiny_tokenizer())
    assert base == tokenizer_fingerprint(tiny_tokenizer())
    used = tiny_tokenizer()
    used(["a", "bc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == base
    changed = [tiny_tokenizer() for _ in range(3)]
    changed[0].add_tokens(["x1"])
    changed[1].chat_template += " "
    changed[2].eos_token = "<|endoftext|>"
    assert len({base, *map(tokenizer_fingerprint, changed)}) == 4


def test_opening_says_what_to_run(options, tmp_path):
    for folder in (tmp_path / "nowhere", ""):
        with pytest.raises(DataError, match="run `draftsmith prepare`"):
            open_prepared(folder)
    run(options)
    os.truncate(os.path.join(options.prepared, "data-00000.arrow"), 100)
    with pytest.raises(DataError, match="damaged or missing .* run `draftsmith prepare`"):
        open_prepared(options.prepared)


def test_pickled_it_is_small_and_opens_again(options):
    run(options)
    dataset = open_prepared(options.prepared)
    dataset[0]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 3000
    copy = pickle.loads(pickled)
    assert copy._mapped is None
    np.testing.assert_array_equal(copy[3].tokens, dataset[3].tokens)
    assert copy.fingerprint == dataset.fingerprint


def test_a_replaced_folder_is_noticed_by_later_workers(options):
    run(options)
    dataset = open_prepared(options.prepared)
    before = dataset[0].tokens
    pickled = pickle.dumps(dataset)
    write(options, ROWS[::-1])
    run(options)
    np.testing.assert_array_equal(dataset[0].tokens, before)  # still mapped
    with pytest.raises(DataError, match="replaced since it was opened"):
        pickle.loads(pickled)[0]


def test_reading_is_fast(options):
    write(options, [row(f"q{i}", "answer " * 250) for i in range(300)])
    run(options)
    dataset = open_prepared(options.prepared)
    best = min(timed(dataset) for _ in range(5))
    assert best < 100e-6, f"{best * 1e6:.0f} us a row"  # about 8 us when written


def timed(dataset):
    start = time.process_time()  # of this process alone: the machine may be busy with others
    for index in range(0, 300, 3):
        dataset[index]
    return (time.process_time() - start) / 100


def python(code, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_opening_loads_no_pickle(options):
    run(options)
    code = """
        import sys
        from draftsmith.data.dataset import open_prepared
        seen = []
        sys.addaudithook(lambda event, args: seen.append(args) if event.startswith("pickle") else None)
        dataset = open_prepared(sys.argv[1])
        rows = [dataset[i] for i in range(len(dataset))]
        assert not seen, seen
        import pickle
        pickle.loads(pickle.dumps(len))
        assert seen, "the hook does not work"
        print(len(rows), "datasets" in sys.modules)
    """
    done = python(code, options.prepared)
    assert done.stdout.split() == ["5", "False"], done.stderr
