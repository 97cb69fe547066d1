"""Which engines generate under which memory limits, and in what order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from colibri_format import ColibriError, UsageError, format_size, parse_size

ALLOWANCE: Final = 40 * 2**20
"""What of a limit our budget leaves for interpreter, libraries and page tables, which the limit
counts and the budget does not. The most that a process held beyond its plan was 9 MiB (OLMoE shape,
25 %), as plans round up; page tables and the kernel's own come to that."""

N_PROMPT: Final = 8
"""Tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory for a whole process, page cache included; None is all there is."""

    name: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class Arm:
    """One engine and its settings; `module` runs it as a child process."""

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One child process to be measured."""

    round: int
    limit: Limit
    arm: Arm
    prompt: tuple[int, ...]
    is_timed: bool = False


def parse_limits(text: str, model_bytes: int) -> list[Limit]:
    """`25%,1G,none`: shares of the model's size, sizes, or no limit at all.

    Raises:
        UsageError: `bad-limit`.
    """
    return [_limit(part.strip(), model_bytes) for part in text.split(",")]


def _limit(text: str, model_bytes: int) -> Limit:
    if text == "none":
        return Limit(text, None)
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            size = int(share * model_bytes)
        else:
            size = parse_size(text)
    except (ValueError, OverflowError, ColibriError) as error:
        raise _bad_limit(text) from error
    if size <= ALLOWANCE:
        raise _bad_limit(text, f"that is {format_size(max(size, 0))}")
    return Limit(text, size)


def _bad_limit(text: str, found: str = "is no limit") -> UsageError:
    return UsageError(
        "bad-limit",
        f"limit {text!r}",
        found,
        f"a share of the model as 25%, a size as 2G, both above {format_size(ALLOWANCE)}, or none",
    )


def peer_arms(
    limit: Limit, threads: Sequence[int], repacks: Sequence[bool] = (False, True)
) -> list[Arm]:
    """llama.cpp at each thread count, without and with its weight repacking where memory allows.

    Repacked weights are a second copy that no page can be dropped of: under a limit below the
    model's size such a process is killed while it loads. So with a limit they are left out.
    """
    if limit.size_bytes is not None:
        repacks = (False,)
    return [
        Arm(
            f"llama.cpp {n} threads{', repacked' if use_repack else ''}",
            "colibri_bench.peer_llamacpp",
            {"n_threads": n, "use_repack": use_repack, "use_mmap": True},
        )
        for use_repack in repacks
        for n in threads
    ]


def plan_prompts(n_rounds: int, vocab_size: int) -> list[tuple[int, ...]]:
    """A prompt for each round: tokens spread over the vocabulary, no two prompts alike."""
    step = max(1, vocab_size // (N_PROMPT + 1))
    return [
        tuple((257 + 1009 * number + step * place) % vocab_size for place in range(N_PROMPT))
        for number in range(n_rounds)
    ]


def plan_runs(
    limits: Sequence[Limit],
    arms: Sequence[Sequence[Arm]],
    prompts: Sequence[tuple[int, ...]],
) -> list[Run]:
    """Every arm under its limit once a round (`arms[i]` under `limits[i]`), a prompt a round.

    Arms that are compared follow each other, and each round begins with another one, so that a
    machine that becomes slower or faster meanwhile treats all alike.
    """
    return [
        Run(number, limit, of_limit[(place + number) % len(of_limit)], prompt)
        for number, prompt in enumerate(prompts)
        for limit, of_limit in zip(limits, arms, strict=True)
        for place in range(len(of_limit))
    ]


def plan_timed(limits: Sequence[Limit], ours: Arm, prompt: tuple[int, ...]) -> list[Run]:
    """A further run of ours under each limit, whose reads and steps are written down."""
    return [Run(0, limit, ours, prompt, is_timed=True) for limit in limits]
