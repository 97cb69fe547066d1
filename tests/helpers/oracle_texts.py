"""What the models are asked in comparisons with llama.cpp."""

from __future__ import annotations

PROMPTS = (
    "Once upon a time there was a",
    "The king said to his youngest daughter,",
    "def read(self, size=-1):",
    "import os\nimport sys\n\nclass ",
    "It was a dark night, and the old woman",
    "In 1969 there were 12 people who",
)

# Public domain: the first sentences of "The Adventures of Sherlock Holmes" (Doyle, 1892).
PASSAGE = (
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any "
    "other name. In his eyes she eclipses and predominates the whole of her sex. It was not that "
    "he felt any emotion akin to love for Irene Adler. All emotions, and that one particularly, "
    "were abhorrent to his cold, precise but admirably balanced mind."
)

N_TOKENS = 48
