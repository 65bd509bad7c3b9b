"""Hardware and model profiles: what an instance costs and holds, for simulation and for priors.

A profile is data: coefficients of core.schedule.cost, bandwidths and capacities. Built-in ones
stand in the dict below; `moonserve replay --profile-out` writes one fitted from a live run, which
`moonserve simulate --profile FILE` reads. Nothing here predicts; Cost does.
"""

from __future__ import annotations

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.core.schedule.cost import Cost
from moonserve.core.units import Bytes, Micros, Tokens


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage of a request takes beside passes and links, in microseconds."""

    base_us: float = 0.0
    token_us: float = 0.0
    """For each token that the stage handles."""
    cold_us: float = 0.0
    """How much longer it takes at most, if the machine was idle; see Profile.cold_after_us."""

    def us(self, tokens: Tokens, cold: float, pace: float = 1.0) -> Micros:
        """For so many tokens. cold: from 0, a machine at work, to 1, one that was idle for long.
        pace: how many times longer everything takes, for want of cores."""
        return round(pace * (self.base_us + self.token_us * tokens + self.cold_us * cold))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of instance serving one model."""

    name: str
    source: str
    """Where the numbers come from, and whether they were held against a measurement."""
    pass_us: tuple[float, float, float, float, float, float, float]
    """See Cost.pass_us."""
    kv_bytes_per_token: Bytes
    link_bytes_per_s: float
    """What one node sends, and what it receives."""
    kv_tokens: Tokens
    """KV that one decode instance holds."""
    load_base_us: float = 0.0
    """What a KV transfer takes beside its bytes."""
    arrive: Overhead = Overhead()
    """From a request's arrival at the gateway until the Conductor has it. Tokens: of the prompt."""
    call: Overhead = Overhead()
    """The way of a prefill call to its instance and back. Tokens: of the prompt."""
    turn: Overhead = Overhead()
    """At its instance, beside the passes of others. Tokens: of the prompt."""
    own_load: Overhead = Overhead()
    """Loading KV from the instance's own segment. Tokens: those that are loaded."""
    publish: Overhead = Overhead()
    """From the end of a prefill's last pass until its KV is in the store. Tokens: computed ones."""
    decode_call: Overhead = Overhead()
    """From a decode call until its KV begins to move, and its token's way back. Tokens: of the
    prompt."""
    wake_us: float = 0.0
    """How much longer a pass takes at most, if the machine was idle before it."""
    cold_after_us: float = 0.0
    """A machine that was idle for this long is half as cold as it ever gets; 0: it never is."""
    cores: float = 0.0
    """How many instances can compute at a time at full speed, if all are on one machine: more take
    turns. 0: each has cores of its own."""
    layers: int = 0
    """Of the model; 0: it is not split over instances, see core.pipeline."""

    def cost(self, *, learns: bool = False) -> Cost:
        """A cost model that starts from these coefficients."""
        return Cost(self.pass_us, (self.load_base_us, 1e6 / self.link_bytes_per_s), learns=learns)


OVERHEADS = ("arrive", "call", "turn", "own_load", "publish", "decode_call")
"""The fields of a Profile that are an Overhead, in the order of a request's stages."""

_A800_PREFILL = (67_900.0, 109.55, 7.413e-4, 2.5645)
_LLAMA_70B_KV: Bytes = 327_680

PROFILES = {
    "a800": Profile(
        "a800",
        "8xA800, LLaMA3-70B: prefill within 4% of FAST'25 Fig. 14; decode of a lightly loaded node",
        (*_A800_PREFILL, 26_040.0, 211.0, 0.03446),
        _LLAMA_70B_KV,
        87e9,
        1_300_000,
        layers=80,
    ),
    "a800-loaded": Profile(
        "a800-loaded",
        "8xA800, LLaMA3-70B: as a800, with the decode step of a loaded node",
        (*_A800_PREFILL, 21_600.0, 4_200.0, 0.03446),
        _LLAMA_70B_KV,
        87e9,
        1_300_000,
        layers=80,
    ),
    "h800": Profile(
        "h800",
        "8xH800, LLaMA3-70B, NOT VALIDATED: a800 scaled by peak FLOP/s (989/312), memory "
        "bandwidth (3.35/2.04 TB/s) and links (190/87 GB/s)",
        (21_420.0, 34.56, 2.339e-4, 1.174, 15_860.0, 128.5, 0.02098),
        _LLAMA_70B_KV,
        190e9,
        1_300_000,
        layers=80,
    ),
}


def profile_of(name: str) -> Profile:
    """A built-in profile. Raises ConfigError."""
    try:
        return PROFILES[name]
    except KeyError:
        known = ", ".join(PROFILES)
        raise ConfigError(
            f"{name} is neither a profile ({known}) nor a file of one", "profile"
        ) from None


def profile_from_json(text: bytes, where: str) -> Profile:
    """A profile that was written to a file. Raises ConfigError naming the field."""
    try:
        profile = msgspec.json.decode(text, type=Profile)
    except UNREADABLE as err:
        raise ConfigError(f"{where} is no profile: {err}", "profile") from None
    for field, value in (
        ("pass_us", min(profile.pass_us)),
        ("kv_bytes_per_token", profile.kv_bytes_per_token - 1),
        ("kv_tokens", profile.kv_tokens - 1),
        ("link_bytes_per_s", profile.link_bytes_per_s - 1),
        ("load_base_us", profile.load_base_us),
        *((field, min(msgspec.structs.astuple(getattr(profile, field)))) for field in OVERHEADS),
        ("wake_us", profile.wake_us),
        ("cold_after_us", profile.cold_after_us),
        ("cores", profile.cores),
        ("layers", profile.layers),
    ):
        if not value >= 0:
            raise ConfigError(f"{where}: {field} is too small", "profile")
    return profile
