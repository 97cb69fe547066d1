"""Logits of random models as transformers computes them (needs torch and transformers)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .random_models import prompt_tokens, random_state, write_checkpoint


def transformers_logits(name: str) -> NDArray[np.float32]:
    """`(n_tokens, vocab_size) float32` for the model's prompt: float32, eager attention.

    Loading must take every tensor of the checkpoint and miss none, else the comparison would be
    with freshly initialised weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), name)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        if any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise RuntimeError(f"{name}: transformers did not load the checkpoint as it is: {info}")
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt_tokens(name)])).logits[0]
        return np.ascontiguousarray(logits.numpy(), np.float32)


def saved_names(name: str) -> set[str]:
    """Tensor names that transformers itself writes when it saves the loaded model."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), name)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(Path(folder) / "again")
        with safe_open(Path(folder) / "again" / "model.safetensors", "np") as file:
            return set(file.keys())


def checkpoint_names(name: str) -> set[str]:
    """Tensor names of the random model."""
    return set(random_state(name))
