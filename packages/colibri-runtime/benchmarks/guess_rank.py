"""How often a layer's router, asked one layer early, is right, by the rank of its choice.

    python guess_rank.py MODEL.colibri TEXT_FILE [--tokens 300]

Decodes the text token by token. A guess is the next layer's choice on the stream that lacks the
present layer's experts, which is what the decoder prefetches by; it is right if the layer then
asks for it, at whatever rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from colibri_runtime import RunConfig, Runtime
from colibri_runtime.tokenizer import load_tokenizer


class Listener:
    """The steps of a decoder, with each guess compared with the choice that followed."""

    def __init__(self, steps, top_k):
        self._steps = steps
        self._guesses = {}
        self.n_right = np.zeros(top_k)
        self.n_guesses = 0

    def __getattr__(self, name):
        return getattr(self._steps, name)

    def predict(self, layer):
        guess = self._guesses[layer] = self._steps.predict(layer)
        return guess

    def route(self, layer):
        routing = self._steps.route(layer)
        if (guess := self._guesses.pop(layer, None)) is not None:
            self.n_right += np.isin(guess, routing.experts[0])
            self.n_guesses += 1
        return routing


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args(argv)
    with Runtime.open(options.model, RunConfig(prefetch_depth=1)) as runtime:
        decoder = runtime.decoder
        # Resident experts need no guess; here every layer's is wanted.
        type(decoder._store).look_ahead = property(lambda store: 1)
        listener = decoder._steps = Listener(decoder._steps, decoder.model.moe.top_k)
        tokens = load_tokenizer(runtime.reader).encode(options.text.read_text())[: options.tokens]
        for token in tokens:
            decoder.forward([int(token)])
    shares = listener.n_right / listener.n_guesses
    print(
        f"{len(tokens)} tokens, {listener.n_guesses} guesses of {len(shares)} experts: right by "
        f"rank {', '.join(f'{share:.0%}' for share in shares)}; all {shares.mean():.0%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
