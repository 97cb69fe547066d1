"""Where `colibri.h`, the reader for C and C++, is installed."""

from __future__ import annotations

from pathlib import Path


def get_include() -> str:
    """The folder that holds `colibri.h`, for a compiler's `-I`.

    >>> from pathlib import Path
    >>> (Path(get_include()) / "colibri.h").is_file()
    True
    """
    return str(Path(__file__).parent / "include")
