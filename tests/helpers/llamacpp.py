"""llama.cpp as an oracle, through xllamacpp, set so that its numbers can be compared.

Three settings differ from its defaults: weights are not repacked for the CPU (`no_extra_bufts`),
keys and values are kept in F32, flash attention is off. What remains is that llama.cpp rounds
activations to 8 bits before it multiplies them with quantised weights, where the NumPy backend
keeps float32. On SmolLM2 that moves a token's log-probability by 0.09 (standard deviation).
So a GGUF is compared twice: as it is, with room for that rounding, and as its float twin, the
same weights decoded by gguf's own code and written as F32, with which llama.cpp computes in
float32 throughout.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

# Candidates asked for at first; a token that is not among them is looked up in the whole
# vocabulary, which is slow for large ones.
_FEW_CANDIDATES = 400


class LlamaCpp:
    """One GGUF opened in llama.cpp; `vocab_size` is the number of its tokens."""

    def __init__(self, path: Path, vocab_size: int, n_context: int = 512) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.no_extra_bufts = True
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_ctx = n_context
        params.n_parallel = 1
        params.warmup = False
        params.fit_params = False
        params.verbosity = -1
        params.cpuparams.n_threads = 1
        params.cpuparams_batch.n_threads = 1
        self.vocab_size = vocab_size
        self._server = xllamacpp.Server(params)

    def greedy(self, tokens: list[int], n_tokens: int) -> tuple[list[int], list[float]]:
        """The likeliest continuation, and each first choice's lead in log-probability.

        Ends early where the model ends its text.
        """
        steps = self._steps(tokens, n_tokens, 2)
        leads = [s["top_logprobs"][0]["logprob"] - s["top_logprobs"][1]["logprob"] for s in steps]
        return [step["id"] for step in steps], leads

    def greedy_after_text(self, text: str, n_tokens: int) -> list[int]:
        """The likeliest continuation of `text`, which llama.cpp turns to tokens itself."""
        return [step["id"] for step in self._steps(text, n_tokens, 1)]

    def next_log_probabilities(self, prompt: list[int] | str) -> dict[int, float]:
        """Of the likeliest tokens after `prompt`, a text or its tokens."""
        step = self._steps(prompt, 1, min(_FEW_CANDIDATES, self.vocab_size))[0]
        return {int(c["id"]): float(c["logprob"]) for c in step["top_logprobs"]}

    def log_probabilities(self, tokens: list[int]) -> list[float]:
        """Of each of `tokens` but the first, given those before it."""
        found = []
        for n_before in range(1, len(tokens)):
            wanted = tokens[n_before]
            for n_candidates in (min(_FEW_CANDIDATES, self.vocab_size), self.vocab_size):
                step = self._steps(tokens[:n_before], 1, n_candidates)[0]
                by_token = {c["id"]: c["logprob"] for c in step["top_logprobs"]}
                if wanted in by_token:
                    break
            found.append(float(by_token[wanted]))
        return found

    def _steps(self, prompt: list[int] | str, n_tokens: int, n_probs: int) -> list[dict[str, Any]]:
        answer = self._server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": n_tokens,
                "temperature": 0,
                "n_probs": n_probs,
                "post_sampling_probs": False,
                "cache_prompt": True,
            }
        )
        steps: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        return steps


def write_float_twin(source: Path, target: Path) -> None:
    """Writes `source`'s model to the GGUF `target` with every tensor decoded to F32."""
    from gguf import GGUFReader, GGUFWriter, quants

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(
            key, field.contents(), kinds[0], sub_type=kinds[1] if kinds[1:] else None
        )
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(n) for n in reversed(tensor.shape)]
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def perplexity(log_probabilities: list[float]) -> float:
    """Exponential of the mean negative log-probability."""
    return math.exp(-sum(log_probabilities) / len(log_probabilities))


def record_model(path: Path, folder: Path) -> dict[str, Any]:
    """All that comparisons need of llama.cpp's opinion on a GGUF and on its float twin.

    Also sees to it that llama.cpp turns the prompts to the same tokens as the tokenizer rebuilt
    from the GGUF's keys.
    """
    from colibri_runtime.tokenizer import load_tokenizer

    from .gguf_model import GgufTextFile
    from .oracle_texts import N_TOKENS, PASSAGE, PROMPTS

    file = GgufTextFile(path)
    tokenizer = load_tokenizer(file)
    vocab_size = len(file.keys["tokenizer.ggml.tokens"])
    twin = folder / "twin.gguf"
    write_float_twin(path, twin)
    passage = tokenizer.encode(PASSAGE)
    record: dict[str, Any] = {"file": path.name, "passage_tokens": passage}
    for kind, source in (("stored", path), ("twin", twin)):
        oracle = LlamaCpp(source, vocab_size)
        runs = []
        for prompt in PROMPTS:
            tokens = tokenizer.encode(prompt)
            made, leads = oracle.greedy(tokens, N_TOKENS)
            if oracle.greedy_after_text(prompt, N_TOKENS) != made:
                raise ValueError(f"llama.cpp turns {prompt!r} to other tokens than {tokens}")
            rounded = [round(lead, 4) for lead in leads]
            runs.append({"prompt_tokens": tokens, "tokens": made, "leads": rounded})
        log_probabilities = [round(p, 5) for p in oracle.log_probabilities(passage)]
        record[kind] = {"greedy": runs, "log_probabilities": log_probabilities}
    return record
