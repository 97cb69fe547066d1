"""The repack-only families of `family_states` as GGUF files."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers import family_states as f
from helpers import gguf_builder as g

Array = np.ndarray[Any, np.dtype[Any]]


def gguf_of(family: str, storage: str) -> g.GgufBuilder:
    """The family as GGUF: experts stacked, fused or one by one."""
    arch = f.architecture(family)
    builder = g.GgufBuilder().add("general.architecture", g.STRING, arch)
    numbers = {"block_count": f.n_layers(family), "embedding_length": f.HIDDEN}
    if not family.startswith("gemma"):
        numbers |= {"expert_count": f.N_EXPERTS, "expert_used_count": f.TOP_K}
    for key, number in numbers.items():
        builder.add(f"{arch}.{key}", g.U32, number)
    state: dict[str, Array] = dict(f.dense_state(family))
    experts = f.expert_state(family)
    for layer in dict.fromkeys(layer for layer, _, _ in experts):
        for matrix in dict.fromkeys(m for _, _, m in experts):
            name, part = matrix.removesuffix("_bias"), "bias" if "_" in matrix else "weight"
            if family.startswith("gemma"):
                state[f"blk.{layer}.ffn_{name}.{part}"] = experts[layer, 0, matrix]
                continue
            arrays = [experts[layer, e, matrix] for e in range(f.N_EXPERTS)]
            if storage == "single":
                for expert, array in enumerate(arrays):
                    state[f"blk.{layer}.ffn_{name}.{expert}.{part}"] = array
            elif storage == "stacked" or name == "down":
                state[f"blk.{layer}.ffn_{name}_exps.{part}"] = np.stack(arrays)
            elif name == "gate":
                ups = [experts[layer, e, matrix.replace("gate", "up")] for e in range(f.N_EXPERTS)]
                both = [np.concatenate(pair) for pair in zip(arrays, ups, strict=True)]
                state[f"blk.{layer}.ffn_gate_up_exps.{part}"] = np.stack(both)
    for name, array in state.items():
        builder.tensor(name, array.shape, 0, array.tobytes())
    return builder
