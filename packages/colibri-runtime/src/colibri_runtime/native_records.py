"""Structs of the C library and their records in NumPy, held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._native import NativeLibrary
from .decoder_errors import ModelError


def check_sizes(
    library: NativeLibrary, function: str, records: Sequence[np.dtype[Any]], module: str
) -> None:
    """Nothing, when the structs that `function` numbers are as large as the `records` of `module`.

    Raises:
        ModelError: `native-records`; the two were built from different sources.
    """
    which_one = ["i32"] if len(records) > 1 else []
    size_of = library.function(function, "i64", *which_one)
    for which, record in enumerate(records):
        if (found := size_of(which) if which_one else size_of()) != record.itemsize:
            raise ModelError(
                "native-records",
                library.path,
                f"its struct {which} has {found} bytes",
                f"{record.itemsize}, as {module} has it",
                "reinstall colibri-runtime",
            )
