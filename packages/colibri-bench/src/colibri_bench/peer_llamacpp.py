"""llama.cpp in a process of its own: generates along with us, and says how long it took.

Run as `python -m colibri_bench.peer_llamacpp REQUEST`, REQUEST and answer being JSON objects. It
needs the package xllamacpp, which carries llama.cpp.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from colibri_runtime.machine import peak_rss_bytes

from ._native import die_with
from .work import count_work, mapped_files, memory_group


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second after `n_warm` further tokens, and what the process had to do for them.

    `request`: gguf, prompt (token numbers), n_warm, n_tokens, n_threads, n_context, use_mmap,
    use_repack (of weights to its own layouts in memory).
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["gguf"]
    params.no_extra_bufts = not request["use_repack"]
    mode = xllamacpp.llama_load_mode
    params.load_mode = (
        mode.LLAMA_LOAD_MODE_MMAP if request["use_mmap"] else mode.LLAMA_LOAD_MODE_NONE
    )
    params.n_ctx = request["n_context"]
    params.n_parallel = 1
    params.warmup = False
    params.fit_params = False
    params.verbosity = -1
    params.cpuparams.n_threads = request["n_threads"]
    params.cpuparams_batch.n_threads = request["n_threads"]
    started = time.perf_counter()
    server = xllamacpp.Server(params)
    load_s = time.perf_counter() - started
    tokens = list(request["prompt"])
    tokens += _complete(server, tokens, request["n_warm"])[0]
    before = count_work()
    made, timings = _complete(server, tokens, request["n_tokens"])
    after = count_work()
    return {
        "tokens": made,
        "n_tokens": timings["predicted_n"],
        "tokens_per_s": timings["predicted_per_second"],
        "load_s": load_s,
        "n_major_faults": after.n_major - before.n_major,
        "read_bytes": after.read_bytes - before.read_bytes,
        "cpu_s": after.cpu_s - before.cpu_s,
        "version": xllamacpp.__version__,
        "kv_types": [str(params.cache_type_k), str(params.cache_type_v)],
        "mapped": mapped_files(),
        "peak_rss_bytes": peak_rss_bytes(),
        "memory_group": memory_group(),
    }


def _complete(server: Any, prompt: list[int], n_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """The tokens that follow `prompt`, likeliest first, and llama.cpp's own timings of them.

    Their numbers come with their probabilities; a token that ends inside a character has none.
    """
    answer: dict[str, Any] = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "n_probs": 1,
        }
    )
    if "timings" not in answer:
        raise RuntimeError(f"llama.cpp did not answer: {answer}")
    steps = answer["choices"][0]["logprobs"]["content"]
    return [int(step["id"]) for step in steps], answer["timings"]


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    die_with(wanted["parent"])
    sys.stdout.write(json.dumps(generate(wanted)) + "\n")
