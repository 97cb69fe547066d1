"""What all tests need of the process that runs them."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # A shell without job control starts what runs in its background with SIGINT ignored, which
    # the commands that tests start would inherit, and no Ctrl-C would reach them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
