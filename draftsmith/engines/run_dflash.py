"""Decode with PyPI `dflash` in its own environment: python run_dflash.py REQUESTS.json ANSWERS.json

A list of requests: {"drafter", "target", "prompts": [[ids]], "max_new_tokens", "eos_ids", "block_size", "dtype",
"revision"}. An answer to each: {"answers": [{"tokens", "cycles"}], "versions"}, or {"error"}, or {"fault"} where the
target cannot be loaded. Nothing of draftsmith is imported, so what runs is the engine alone.
"""

import json
import sys
import time
from importlib.metadata import version


def main(requests_path: str, answers_path: str) -> None:
    import dflash.model  # noqa: F401  # pyright: ignore  # a broken environment is no refusal of a drafter

    with open(requests_path) as file:
        requests = json.load(file)
    answers = []
    for request in requests:
        try:
            answers.append(decode(request))
        except Exception as error:  # whatever type an engine refuses a drafter with
            answers.append({"error": f"{type(error).__name__}: {error}"[:600]})
    with open(answers_path, "w") as file:
        json.dump(answers, file)


def decode(request: dict) -> dict:
    import torch
    from dflash import model as dflash  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    cuda = torch.cuda.is_available()
    if not cuda:
        dflash._cuda_time = time.perf_counter  # the package's clock waits for a GPU
    kind = {"dtype": getattr(torch, request["dtype"])}
    try:
        target = AutoModelForCausalLM.from_pretrained(request["target"], revision=request["revision"], **kind).eval()
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {error}"[:600]}
    drafter, loading = dflash.DFlashDraftModel.from_pretrained(request["drafter"], output_loading_info=True, **kind)
    wrong = {name: sorted(map(str, found)) for name, found in loading.items() if found}
    if wrong:
        raise ValueError(f"PyPI dflash did not load every tensor: {wrong}")
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
    return {"answers": answers, "versions": {name: version(name) for name in ("dflash", "torch", "transformers")}}


if __name__ == "__main__":
    main(*sys.argv[1:])
