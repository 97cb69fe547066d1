"""`colibri VERB ...`: finds the verb among installed packages and hands the arguments over."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Final

from colibri_format.command import EXIT_OK, EXIT_USAGE, run_command

GROUP: Final = "colibri.commands"
_USAGE: Final = "usage: colibri VERB [ARGUMENT ...]   (colibri VERB --help tells more)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the verb that `argv` (default: the process's arguments) begins with; its exit status.

    Verbs are the entry points of group `colibri.commands`; only the one that is called is
    loaded. Each is a function from its arguments to an exit status.
    """
    return run_command(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(arguments: list[str]) -> int:
    verbs = {point.name: point for point in sorted(entry_points(group=GROUP))}
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        out = sys.stdout if arguments else sys.stderr
        out.write(_describe(verbs))
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        sys.stdout.write(f"colibri {version('colibri-toolkit')}\n")
        return EXIT_OK
    verb, *rest = arguments
    point = verbs.get(verb)
    if point is None:
        close = difflib.get_close_matches(verb, verbs, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(verbs)}"
        sys.stderr.write(f"error[unknown-verb]: colibri: no verb {verb!r} is installed; {hint}\n")
        return EXIT_USAGE
    command = point.load()
    status: int = command(rest)
    return status


def _describe(verbs: dict[str, EntryPoint]) -> str:
    width = max((len(name) for name in verbs), default=0)
    lines = [f"  {name:<{width}}  {_summary(point)}" for name, point in verbs.items()]
    return "\n".join([_USAGE, "", "verbs:", *lines, ""])


def _summary(point: EntryPoint) -> str:
    """First line of the docstring of the verb's module."""
    try:
        point.load()
    except ImportError as error:
        return f"(cannot be loaded: {error})"
    text = sys.modules[point.module].__doc__ or ""
    line = text.strip().partition("\n")[0]
    # A module's first line reads "`colibri VERB ...`: what it does."
    return line.partition("`: ")[2] or line
