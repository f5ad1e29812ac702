"""How many pages a KV pool gets: what the policy asks, bounded by what fits beside everything else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ninfer.errors import InvalidRequest, OutOfDeviceMemory
from ninfer.program.layout import PAGE, PoolKind, pages
from ninfer.program.licensing import reserved_tokens, unit_touch
from ninfer.program.stores.host import SUPERBLOCK


@dataclass(frozen=True, slots=True)
class ExplicitKV:
    """Exactly this many tokens, rounded up to pages."""

    tokens: int


@dataclass(frozen=True, slots=True)
class AutomaticKV:
    """As many pages as fit. headroom_bytes: left free on the device. ceiling_bytes: never take more than this for
    the whole plan unless a single sequence needs it; None sets no ceiling."""

    headroom_bytes: int = 1 << 30
    ceiling_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """Room for inactive histories. tokens: device tokens beyond what active requests can claim. host_states: state
    images in host memory. host_kv_bytes: host memory for pages, allocated in superblocks as it is first used."""

    tokens: int = 0
    host_states: int = 0
    host_kv_bytes: int = 0
    superblock: int = SUPERBLOCK


@dataclass(frozen=True, slots=True)
class KVCapacityProfile:
    """logical_pages: pages of one sequence at max_context. pages: physical pages per pool. window: most drafts."""

    logical_pages: int
    pages: dict[PoolKind, int]
    max_context: int
    window: int = 0

    def entitlement(self, prompt: int, output: int) -> dict[PoolKind, int]:
        """Pages a request of ``prompt`` tokens and ``output`` tokens that fit the context is guaranteed."""
        reserved = reserved_tokens(prompt, output)
        touched = unit_touch(self.pages, reserved, 0, self.window, self.max_context)
        return {kind: pages(n) for kind, n in touched.items()}


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """pages per pool, tokens of the main pool, planned_bytes of the whole plan, slack_bytes left of what was free."""

    pages: dict[PoolKind, int]
    tokens: int
    planned_bytes: int
    slack_bytes: int


def resolve_capacity(
    policy: ExplicitKV | AutomaticKV,
    *,
    S: int,
    C: int,
    Q: int,
    K: int = 0,
    pools: Collection[PoolKind] = (PoolKind.MAIN,),
    layout_bytes: Callable[[int], int],
    free_bytes: int,
) -> tuple[KVCapacityProfile, CapacityReport]:
    """Choose the pages M of the main pool.

    S: max_context. C: max_concurrency. Q: pages for retained histories beyond what active requests can claim.
    K: drafts of a round. pools: those there are; the one of a drafting module gets pages for what runs ahead.
    ``layout_bytes(m)``: bytes of the whole plan with m pages, non-decreasing. One sequence at its ceiling must fit
    and every lane gets a page: ``max(L, C) <= M <= C*L + Q``, with L pages per sequence. AutomaticKV takes the largest
    such M whose plan fits. Errors: InvalidRequest("kv_capacity") for an explicit size outside the range;
    OutOfDeviceMemory with both numbers when the plan does not fit.
    """
    L = pages(S)
    smallest, largest = max(L, C), C * L + Q
    if isinstance(policy, ExplicitKV):
        M = pages(policy.tokens)
        if policy.tokens < S or not smallest <= M <= largest:
            raise InvalidRequest(
                f"{policy.tokens} tokens: expected {max(S, smallest * PAGE - PAGE + 1)}..{largest * PAGE}"
                f" for max_context {S} and max_concurrency {C}",
                field="kv_capacity",
            )
        budget = free_bytes
    else:
        budget = max(0, free_bytes - policy.headroom_bytes)
        M = largest_that_fits(smallest, largest, layout_bytes, _limit(policy, budget, layout_bytes(smallest)))
    planned = layout_bytes(M)
    if planned > budget:
        raise OutOfDeviceMemory(
            f"the plan needs {planned} bytes, {budget} are free", plan={"total": planned}, free=budget
        )
    profile = KVCapacityProfile(L, pool_pages(pools, M, C, K), S, K)
    return profile, CapacityReport(profile.pages, M * PAGE, planned, free_bytes - planned)


def pool_pages(pools: Iterable[PoolKind], main: int, rows: int, window: int) -> dict[PoolKind, int]:
    """Pages of every pool where the main one has ``main``: with a drafting module each row may run ``window - 1``
    columns ahead."""
    return {kind: main + rows * pages(window - 1) if kind is PoolKind.MTP else main for kind in pools}


def _limit(policy: AutomaticKV, budget: int, least: int) -> int:
    return budget if policy.ceiling_bytes is None else min(budget, max(least, policy.ceiling_bytes))


def largest_that_fits(low: int, high: int, nbytes: Callable[[int], int], limit: int) -> int:
    """The largest n in [low, high] with ``nbytes(n) <= limit``, or ``low`` where there is none. ``nbytes`` rises."""
    while low < high:
        middle = (low + high + 1) // 2
        if nbytes(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
