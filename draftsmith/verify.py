"""Proof that an exported drafter is the trained one.

Everything is loaded afresh from config.json and the weights. An independent reference forward is compared with the
trained code block by block, and with what was recorded at the time of export; decoding must give the target's own
greedy output; and the accept lengths of the trainer, the reference and real engines stand side by side.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from draftsmith.acceptance import told
from draftsmith.commands import VerifyCommand
from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.engines.launch import ask, machine_fault, memory_share, prepare
from draftsmith.engines.server import ask_server, find_model
from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.export.folder import measure
from draftsmith.export.read import DrafterFolder, read_folder
from draftsmith.export.serve import sglang_objections, vllm_remarks
from draftsmith.findings import Findings
from draftsmith.readings import better_readings, compare_readings
from draftsmith.subject import BOUNDS, Expected, Subject, accept_by_slot, make_subject, pooled
from draftsmith.targets import HFTarget
from draftsmith.targets.hf import read_config


def verify_folder(
    command: VerifyCommand, load: Callable[[tuple[int, ...]], HFTarget], say: Callable[[str], None]
) -> Findings:
    """All checks, each said as it is made. `load` gives the target, once the drafter could be read."""
    path = Path(command.folder)
    prompts = check_words(command)
    if not (path / "config.json").is_file():
        raise UserError(f"{command.folder!r} holds no config.json; give the folder of an exported drafter")
    found = Findings(say)
    try:
        folder = read_folder(path)
    except UserError as error:
        found.add("format", False, str(error))
        return found
    tensors = f"{len(folder.tensors)} tensors and every key understood"
    found.add("format", True, f"{folder.layout} layout, {tensors}")
    check_files(folder, found)
    check_rules(folder, found)
    if not check_sizes(folder, read_config(command.target), found):
        return found
    target = load(tuple(folder.config["dflash_config"]["target_layer_ids"]))
    check_target(folder, target, found)
    subject = make_subject(command, prompts, folder, target)
    for check in (check_logits, check_proposals, check_greedy, check_acceptance, check_readings):
        check(subject, found)
    expected = subject.expected
    del subject, target  # an engine needs the GPU for itself
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for engine in command.engine:
        if engine != "reference":
            check_engine(engine, command, expected, found)
    return found


def check_words(command: VerifyCommand) -> list[Prompt]:
    """What can be said about the command before anything is loaded; the prompts of its file, if it names one."""
    if command.url and "vllm" not in command.engine:
        raise UserError("url names a vLLM server, so it has no effect without --engine vllm")
    if command.limit < 1 or command.max_new_tokens < 1:
        raise UserError("limit and max_new_tokens must be greater than 0")
    if command.url:
        find_model(command.url)
    return read_prompts(command.prompts, command.limit) if command.prompts else []


def check_files(folder: DrafterFolder, found: Findings) -> None:
    """The files are those that were written, and their weights are of a type that can be served."""
    if folder.record is None:
        found.add("files", None, "no draftsmith.json, so nothing recorded in training can be compared")
    else:
        listed = folder.record.get("files") or {}
        changed = [n for n, e in listed.items() if not (folder.path / n).is_file() or measure(folder.path / n) != e]
        found.add("files", not changed, f"changed since export: {', '.join(changed)}" if changed else "as written")
    for remark in folder.remarks:
        found.add("weights", False, remark)


def check_rules(folder: DrafterFolder, found: Findings) -> None:
    """What loaders would refuse or guess, and a block larger than the trained one."""
    raw = json.loads((folder.path / "config.json").read_text())
    for remark in vllm_remarks(raw):
        found.add("vllm rules", None, remark)
    if folder.layout == "zlab":
        objections = sglang_objections(raw, folder.config["vocab_size"], folder.config["num_target_layers"])
        found.add("sglang rules", not objections, "; ".join(objections) or "our reading of its loader finds no fault")
    trained = ((folder.record or {}).get("trained") or {}).get("block_size")
    block = folder.config["block_size"]
    if trained and block > trained:
        found.add("block size", None, f"{block} is larger than the trained {trained}; acceptance falls at every slot")


def check_sizes(folder: DrafterFolder, target: PretrainedConfig, found: Findings) -> bool:
    """Whether this can be the drafter's target at all."""
    sizes = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_hidden_layers"}
    if folder.layout == "speculators" and folder.record is None:
        sizes.pop("num_target_layers")  # not part of that layout
    wrong = [
        f"{mine} is {folder.config[mine]}, the target's {getattr(target, theirs)}"
        for mine, theirs in sizes.items()
        if folder.config[mine] != getattr(target, theirs)
    ]
    if wrong:
        found.add("target", False, "; ".join(wrong))
    return not wrong


def check_target(folder: DrafterFolder, target: HFTarget, found: Findings) -> None:
    """The fingerprint tells whether it is the drafter's target; tables in the folder must be the target's."""
    record = folder.record or {}
    recorded = (record.get("fingerprints") or {}).get("target")
    comparable = recorded and record["measured"]["dtype"] == str(target.head.dtype).removeprefix("torch.")
    if comparable and recorded != target.fingerprint:
        found.add("target", False, "another target than the one trained for (its fingerprint differs)")
    else:
        found.add("target", True, "the one trained for" if comparable else "sizes fit; not known which it was")
    for name, mine in folder.shared.items():
        theirs = target.model.get_input_embeddings().weight if name.startswith("embed") else target.head
        if not torch.equal(mine.to(torch.bfloat16), theirs.detach().cpu().to(torch.bfloat16)):
            found.add("target", False, f"{name} is not the target's")


def _anchors(subject: Subject) -> Iterator[tuple[Tensor, Tensor]]:
    """A few texts of each prompt's answer (the last token is the anchor), with all states before it."""
    for prompt, answer in zip(subject.prompts, subject.plain, strict=True):
        for committed in sorted({1, max(1, len(answer) // 2), max(1, len(answer) - 1)}):
            text = torch.cat([prompt, prompt.new_tensor(answer[:committed])])
            yield text, text[:-1]


def check_logits(subject: Subject, found: Findings) -> None:
    """(a) The reference against the code that was trained, block by block, loaded from the same folder."""
    drafter = subject.folder.drafter().to(device=subject.target.device)
    taps, block = subject.reference.reading.taps, subject.reference.reading.block_size
    worst, blocks, agreed = 0.0, 0, 0
    for text, context in _anchors(subject):
        _, states = subject.decoder.run(context, subject.decoder.new_cache())
        features = torch.cat([states[number + 1] for number in taps], dim=-1).float()
        theirs = subject.decoder.draft(subject.reference, features, int(text[-1]), block)[1:]
        slots = torch.full((block,), subject.reference.reading.mask_token_id, device=text.device)
        slots[0] = text[-1]
        with torch.no_grad():
            positions = torch.arange(len(context), device=text.device)
            hidden = drafter.propose(drafter.project(features, positions), subject.target.embed(slots).float())
        ours = hidden @ subject.target.head.float().T
        worst = max(worst, float(((ours - theirs).abs().amax(-1) / theirs.std(-1)).max()))
        agreed += int((ours.argmax(-1) == theirs.argmax(-1)).all())
        blocks += 1
    # Both compute in fp32 from the same features, whatever the target's format.
    limit = BOUNDS[torch.float32].logits
    found.add(
        "logits",
        worst <= limit,
        f"reference against the trained code: {blocks} blocks, largest difference {worst:.1e} of a deviation, "
        f"first choice equal in {agreed}",
    )


def check_proposals(subject: Subject, found: Findings) -> None:
    """The reference against the logits written down at export, on the very texts."""
    measured = (subject.folder.record or {}).get("measured")
    if not measured:
        return
    worst, equal, total = 0.0, 0, 0
    taps, block = subject.reference.reading.taps, subject.folder.record["trained"]["block_size"]
    for note in measured["proposals"]:
        answer = measured["answers"][note["answer"]]
        text = torch.tensor(answer["prompt"] + answer["tokens"][: note["committed"]], device=subject.target.device)
        if int(text.max()) >= subject.target.config.vocab_size:
            found.add("proposals", False, "the recorded text is not of this target's vocabulary")
            return
        _, states = subject.decoder.run(text[:-1], subject.decoder.new_cache())
        features = torch.cat([states[number + 1] for number in taps], dim=-1)
        logits = subject.decoder.draft(subject.reference, features, int(text[-1]), block)[1:]
        known = torch.tensor(note["tokens"], device=text.device)
        difference = logits.gather(1, known) - torch.tensor(note["logits"], device=text.device)
        worst = max(worst, float((difference.abs().amax(-1) / logits.std(-1)).max()))
        equal += int((logits.argmax(-1) == known[:, 0]).sum())
        total += len(known)
    found.add(
        "proposals",
        worst <= subject.record_bounds.logits,
        f"reference against the trainer's record: {equal} of {total} first choices equal, largest difference "
        f"{worst:.1e} of a deviation",
    )


def check_greedy(subject: Subject, found: Findings) -> None:
    """(b) Decoding with the reference gives the target's own greedy output."""
    agreed = subject.expected.compare([run.tokens for run in subject.runs])
    found.add("greedy", "differs" not in agreed, told(agreed))


def check_acceptance(subject: Subject, found: Findings) -> None:
    """(c) The reference's accept length beside the trainer's own, on the same prompts; and per position."""
    value = pooled([run.cycles for run in subject.runs])
    found.figures["reference"] = value
    by_slot = accept_by_slot([run.accepted for run in subject.whole_runs], subject.reference.reading.block_size)
    slots = "by slot " + " ".join(f"{rate:.2f}" for rate in by_slot)
    both = recorded_cycles(subject)
    if not both:
        found.add("acceptance", True, f"accept length {value:.3f} (reference); no record of these answers; {slots}")
        return
    trainer, wanted = pooled([theirs for theirs, _ in both]), pooled([ours for _, ours in both])
    found.figures = {"trainer": trainer, **found.figures}
    found.by_reference["trainer"] = wanted
    few = "" if len(both) == len(subject.runs) else f" on {len(both)} answers that the target still gives"
    said = f"accept length {wanted:.3f} (reference), {trainer:.3f} (trainer){few}, difference {wanted - trainer:+.3f}"
    found.add("acceptance", abs(wanted - trainer) <= subject.record_bounds.accept * trainer, f"{said}; {slots}")
    reported = subject.folder.record["trained"].get("accept")
    if reported and reported > 1.5 and value - 1 < 0.4 * (reported - 1):
        found.add(
            "training",
            None,
            f"training reported {reported:.2f} on its own text, decoding gives {value:.2f}: overfitted, or trained "
            "with other conventions than those of serving",
        )


def recorded_cycles(subject: Subject) -> list[tuple[list[int], list[int]]]:
    """The trainer's and the reference's cycles of each answer that both have; in another number format a target may
    answer otherwise."""
    recorded = ((subject.folder.record or {}).get("measured") or {}).get("answers", [])
    known = {(tuple(a["prompt"]), tuple(a["tokens"])): a["cycles"] for a in recorded}
    keys = [(tuple(p.tolist()), tuple(a)) for p, a in zip(subject.prompts, subject.plain, strict=True)]
    return [(known[key], run.cycles) for key, run in zip(keys, subject.runs, strict=True) if key in known]


def check_readings(subject: Subject, found: Findings) -> None:
    """The conventions of the folder must be those under which its weights work best."""
    scores = compare_readings(
        subject.decoder, subject.reference, list(zip(subject.prompts, subject.plain, strict=True))
    )
    if not scores:
        return
    better = better_readings(scores)
    told = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
    silent = f"; the folder is silent on {', '.join(subject.folder.silent)}" if subject.folder.silent else ""
    found.add("conventions", not better, f"accepted drafts per block: {told}{silent}")


def check_engine(engine: str, command: VerifyCommand, expected: Expected, found: Findings) -> None:
    """The same prompts in a real engine, in its own environment or behind a URL."""
    if engine == "dflash" and expected.layout != "zlab":
        found.add(engine, None, "PyPI dflash reads the z-lab layout only")
        return
    try:
        if command.url and engine == "vllm":
            answer = ask_server(command.url, expected.request)
        else:
            python = prepare(engine, Path(command.engines).expanduser(), found.say)
            (answer,) = ask(engine, python, [expected.request | {"memory_share": memory_share()}])
    except EnvironmentFault as error:
        found.add(engine, False, str(error))
        found.faults.append(engine)
        return
    compare_answer(engine, answer, expected, found)


def compare_answer(engine: str, answer: dict, expected: Expected, found: Findings) -> None:
    """An engine's outputs, accept length and acceptance by slot against the reference's, by the engine's own count."""
    if fault := machine_fault(answer):
        found.add(engine, False, f"could not start, whatever the drafter: {fault}")
        found.faults.append(engine)
        return
    if "error" in answer:
        found.add(engine, False, f"refuses the drafter: {answer['error']}")
        return
    block, bounds = expected.request["block_size"], expected.bounds
    if "num_cycles" in answer:  # vLLM drafts whole blocks, even beyond the end of an answer
        accepted, number = [run.accepted for run in expected.whole_runs], max(1, answer["num_cycles"])
        value, wanted = 1 + answer["num_accepted"] / number, 1 + pooled(accepted)
        slots = [hits / number for hits in answer["by_slot"]]
    else:
        cycles = [[n - 1 for n in one["cycles"]] for one in answer["answers"]]
        accepted = [[n - 1 for n in run.cycles] for run in expected.runs]
        value, wanted = 1 + pooled(cycles), 1 + pooled(accepted)
        slots = accept_by_slot(cycles, block)
    found.versions[engine], found.figures[engine], found.by_reference[engine] = answer["versions"], value, wanted
    pairs = zip(slots, accept_by_slot(accepted, block), strict=False)
    worst = max((abs(theirs - ours) for theirs, ours in pairs), default=0.0)
    agreed, version = expected.compare([a["tokens"] for a in answer["answers"]]), answer["versions"].get(engine, "")
    found.add(
        engine,
        "differs" not in agreed and abs(value - wanted) <= bounds.accept * wanted and worst <= bounds.slot,
        f"{version + ': ' if version else ''}{told(agreed)}; accept length {value:.3f}, reference by the same count "
        f"{wanted:.3f}, difference {value - wanted:+.3f}; by slot at most {worst:.3f}",
    )
