"""Decode with PyPI `dflash` in its own environment: python run_dflash.py REQUEST.json ANSWER.json

The request: {"drafter", "target", "prompts": [[ids]], "max_new_tokens", "eos_ids", "block_size"}. The answer:
{"answers": [{"tokens", "cycles"}], "versions"}. Nothing of draftsmith is imported, so what runs is the engine alone.
"""

import json
import sys
import time
from importlib.metadata import version


def main(request_path: str, answer_path: str) -> None:
    import torch
    from dflash import model as dflash  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    with open(request_path) as file:
        request = json.load(file)
    cuda = torch.cuda.is_available()
    if not cuda:
        dflash._cuda_time = time.perf_counter  # the package's clock waits for a GPU
    kind = {"dtype": torch.bfloat16 if cuda else torch.float32}
    target = AutoModelForCausalLM.from_pretrained(request["target"], **kind).eval()
    drafter, loading = dflash.DFlashDraftModel.from_pretrained(request["drafter"], output_loading_info=True, **kind)
    wrong = {name: sorted(map(str, found)) for name, found in loading.items() if found}
    if wrong:
        raise SystemExit(f"PyPI dflash did not load every tensor: {wrong}")
    if cuda:
        target, drafter = target.cuda(), drafter.cuda()
    answers = []
    for prompt in request["prompts"]:
        found = dflash.dflash_generate(
            drafter.eval(),
            target,
            torch.tensor([prompt], device=target.device),
            max_new_tokens=request["max_new_tokens"],
            stop_token_ids=request["eos_ids"] or None,
            block_size=request["block_size"],
            return_stats=True,
        )
        tokens = found.output_ids[0, len(prompt) :].tolist()
        answers.append({"tokens": tokens, "cycles": found.acceptance_lengths})
    versions = {name: version(name) for name in ("dflash", "torch", "transformers")}
    with open(answer_path, "w") as file:
        json.dump({"answers": answers, "versions": versions}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
