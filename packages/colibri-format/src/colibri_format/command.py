"""What every command line of the toolkit does alike: exit statuses, and how failures are told."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Container, Iterator
from typing import Final

from .errors import ColibriError, UsageError, printable

EXIT_OK: Final = 0
EXIT_DATA: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def run_command(
    body: Callable[[], int],
    *,
    usage: tuple[type[ColibriError], ...] = (UsageError,),
    usage_codes: Container[str] = (),
    on_interrupt: str = "interrupted",
) -> int:
    """The exit status of `body`: its own, or that of the error it ended with, told on stderr.

    0 fine, 1 data or I/O failure, 2 usage (errors of the types `usage`, or with one of
    `usage_codes`), 130 interrupted. A reader of stdout that has gone, as `head` does, ends the
    command without a word and with 1; a stdout that cannot be written to is told. Streams that are
    closed are replaced by the null device; characters that their encoding lacks are escaped.
    """
    _open_streams()
    try:
        status = body()
        sys.stdout.flush()
    except SystemExit:
        # argparse ends so after --help; what it printed may still fail to be written.
        return _exit_after_flush()
    except ColibriError as error:
        is_usage = isinstance(error, usage) or error.code in usage_codes
        return _tell(error.code, error, EXIT_USAGE if is_usage else EXIT_DATA)
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):
            print(on_interrupt, *_notes(error), sep="\n", file=sys.stderr)
        return interrupt_status(error)
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_DATA
    except MemoryError as error:
        return _tell_memory(error)
    except OSError as error:
        # The kernel's own shortage is no matter of a stream.
        return _tell_memory(error) if error.errno == errno.ENOMEM else _tell_stream(error)
    return status


class Terminated(KeyboardInterrupt):
    """A signal that asks the process to end was received; `status` is the one to exit with."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def interrupt_status(error: KeyboardInterrupt) -> int:
    """The exit status of a command that was ended so: 130, or 128 and the signal's number."""
    return error.status if isinstance(error, Terminated) else EXIT_INTERRUPTED


@contextlib.contextmanager
def ends_like_interrupt() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end the work as Ctrl-C does, so that it can be tidied up.

    Signals that are ignored stay so, as under nohup. For the main thread.
    """

    def end(number: int, frame: object) -> None:
        raise Terminated(number)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _notes(error: BaseException) -> list[str]:
    """What was noted on `error` on its way, as where unfinished work was left."""
    return [printable(note) for note in getattr(error, "__notes__", ())]


def _exit_after_flush() -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_DATA
    except OSError as error:
        return _tell_stream(error)
    raise  # noqa: PLE0704  # the SystemExit that is being handled


def _tell_memory(error: BaseException) -> int:
    detail = f" ({error})" if str(error) else ""
    text = f"the system gave no memory{detail}"
    return _tell("out-of-memory", "\n".join([text, *_notes(error)]), EXIT_DATA)


def _tell(code: str, error: object, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"error[{code}]: {error}", file=sys.stderr)
        if isinstance(error, BaseException):
            for note in _notes(error):
                print(note, file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return status


def _tell_stream(error: OSError) -> int:
    """Tells of a failure that belongs to no file of the command's: files come as ColibriError."""
    _drop_stdout()
    where = error.filename if error.filename is not None else "standard output"
    return _tell("os-error", f"{where}: {error.strerror or error}", EXIT_DATA)


def _drop_stdout() -> None:
    """Sends what is still buffered nowhere, so that it does not fail once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _open_streams() -> None:
    """Python leaves None where a standard stream was closed before it started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A file's name may hold what the terminal's encoding has no sign for.
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
