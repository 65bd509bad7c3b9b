"""Placement policies by name: which prefill instance wins, by which score.

A policy is one function from Options, the terms of every candidate, to one score per candidate.
The lowest score wins. Each docstring names its source. The rules of other routers stand in
core.schedule.peer_policies. late_binding uses Algorithm 1's score. core.schedule.decide calls them.

To add a policy, write one function and one entry in POLICIES. The entry says what the policy may
fetch from other instances ("never", "threshold" or "cheaper") and sets its flags (see Policy).

A policy may draw from `state.rng`, a copy that `decide` makes if the policy's flag `draws` is set.
It changes nothing else: not the options, not a view, not the rest of its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from moonserve.core.errors import ConfigError
from moonserve.core.frozen import Frozen
from moonserve.core.schedule.estimate import Fetch, Options
from moonserve.core.schedule.peer_policies import (
    aibrix_conductor,
    dynamo_overlap,
    llmd_latency,
    llmd_scorers,
    preble_e2,
    production_stack_loadaware,
    sglang_cache_aware,
    vllm_cache_aware,
)
from moonserve.core.schedule.policy_state import PolicyState

OVERLOADED = 0.9
"""alpha_beta: an instance this loaded takes nothing while another is less so."""
ALPHA, BETA = 0.7, 0.3

Score: TypeAlias = Callable[[Options, PolicyState], Sequence[float]]


class Policy(Frozen, frozen=True):
    """A rule, and what it may do."""

    score: Score
    fetch: Fetch
    copies: bool = False
    """Whether what is fetched is kept where it was fetched to."""
    late: bool = False
    """Whether requests wait at the Conductor until an instance is about to be free."""
    times: bool = False
    """Whether scores are predicted times: those that differ by no more than the prediction of a
    prefill errs are a tie. Else only equal scores are."""
    prunes: bool = False
    """Whether instances that surely cannot win are skipped before scoring."""
    draws: bool = False
    """Whether it draws from PolicyState.rng."""
    looks_back: bool = False
    """Whether it reads PolicyState.history."""


def kvcache_centric(options: Options, state: PolicyState) -> Sequence[float]:
    """Algorithm 1, FAST'25 page 8: the lowest T_transfer + T_queue + T_prefill.

    Estimate computes the terms, with the balancing threshold of the transfer.
    """
    return options.ttft_us


def random(options: Options, state: PolicyState) -> Sequence[float]:
    """Any instance, by a seeded draw (the papers' first baseline); from its own cache only."""
    assert state.rng is not None, "the random policy needs a seeded generator"
    return [state.rng.random() for _ in options.views]


def round_robin(options: Options, state: PolicyState) -> Sequence[float]:
    """One after the other, in order of ids."""
    count = len(options.views)
    return [(row - state.turn - 1) % count for row in range(count)]


def least_loaded(options: Options, state: PolicyState) -> Sequence[float]:
    """The shortest queue in predicted seconds (the papers' load balancing)."""
    return options.queue_us


def cache_aware(options: Options, state: PolicyState) -> Sequence[float]:
    """Lowest T_queue + T_prefill from the instance's own prefix: FAST'25 section 6.1, local part.

    Algorithm 1 without its transfer branch.
    """
    return [q + c for q, c in zip(options.queue_us, options.compute_us, strict=True)]


def alpha_beta(options: Options, state: PolicyState) -> Sequence[float]:
    """alpha * cached/total + beta * (1 - load), overloaded instances only where all are.

    The simple score of early Mooncake write-ups; it is in neither paper. Load is the predicted
    queue against the longest one here, or against ten seconds where all are shorter.
    """
    full = max(10_000_000, *options.queue_us)
    scores = []
    for local, queue_us in zip(options.local, options.queue_us, strict=True):
        load = queue_us / full
        good = ALPHA * local / options.prompt_blocks + BETA * (1 - load)
        scores.append(-good if load < OVERLOADED else 1.0 + load)
    return scores


POLICIES: Mapping[str, Policy] = {
    "random": Policy(random, "never", draws=True),
    "round_robin": Policy(round_robin, "never"),
    "least_loaded": Policy(least_loaded, "never", times=True),
    "cache_aware": Policy(cache_aware, "never", times=True),
    "alpha_beta": Policy(alpha_beta, "never"),
    "kvcache_centric": Policy(kvcache_centric, "threshold", copies=True, times=True, prunes=True),
    "late_binding": Policy(kvcache_centric, "cheaper", late=True, times=True, prunes=True),
    "sglang_cache_aware": Policy(sglang_cache_aware, "never"),
    "vllm_cache_aware": Policy(vllm_cache_aware, "never"),
    "production_stack_loadaware": Policy(production_stack_loadaware, "never"),
    "dynamo_overlap": Policy(dynamo_overlap, "never", draws=True),
    "llmd_scorers": Policy(llmd_scorers, "never", draws=True),
    "llmd_latency": Policy(llmd_latency, "never", draws=True),
    "aibrix_conductor": Policy(aibrix_conductor, "never", looks_back=True),
    "preble_e2": Policy(preble_e2, "never", looks_back=True),
}
"""late_binding is Algorithm 1's estimate among the instances about to be free, for the request that
core.schedule.waiting picks; what is fetched is not kept twice."""


def policy_of(name: str) -> Policy:
    """A policy by its name. Raises ConfigError."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"{name} is none of {', '.join(POLICIES)}", "policy") from None
