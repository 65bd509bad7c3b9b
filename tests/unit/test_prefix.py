"""Block keys and the prefix index."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.prefix import Namespace, PrefixIndex, chain_keys, tail_key, token_bytes
from moonserve.core.units import BlockKey, SegmentId

ROOT = Namespace("m", "r", "l", 4).root()


def test_key_is_a_chained_sha256_over_little_endian_tokens() -> None:
    """Key i is SHA-256 over key i-1 and block i's tokens as u32 little-endian."""
    first = sha256(ROOT + bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])).digest()
    second = sha256(first + token_bytes([5, 6, 7, 8])).digest()
    assert chain_keys(ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [first, second]


def test_roots_differ_by_every_field() -> None:
    """A change in any namespace field changes the root."""
    base = Namespace("m", "r", "l", 4, "lora", "salt", "mm")
    others = [
        Namespace("M", "r", "l", 4, "lora", "salt", "mm"),
        Namespace("m", "R", "l", 4, "lora", "salt", "mm"),
        Namespace("m", "r", "L", 4, "lora", "salt", "mm"),
        Namespace("m", "r", "l", 8, "lora", "salt", "mm"),
        Namespace("m", "r", "l", 4, "", "salt", "mm"),
        Namespace("m", "r", "l", 4, "lora", "", "mm"),
        Namespace("m", "r", "l", 4, "lora", "salt", ""),
        Namespace("m", "r", "l", 4, "lor", "asalt", "mm"),
    ]
    roots = [n.root() for n in [base, *others]]
    assert len(set(roots)) == len(roots)


def test_the_root_is_frozen() -> None:
    """Stored keys outlive a version of this code: the digest may change only with _VERSION."""
    assert Namespace("m", "r", "l", 4).root().hex() == (
        "48ff79a7d09be19337e01b2a807b49092f07dfaefc9294819b312c86574641a7"
    )


def test_a_tail_never_equals_a_full_block() -> None:
    """A tail of block_size tokens has another key than the full block of the same tokens."""
    keys = chain_keys(ROOT, [1, 2, 3, 4], 4)
    assert tail_key(ROOT, [], [1, 2, 3, 4]) != keys[0]
    assert tail_key(ROOT, keys, [5]) != tail_key(ROOT, [], [5])


holders = st.sampled_from([SegmentId(name) for name in "abcd"])
keys_st = st.integers(0, 7).map(lambda i: BlockKey(bytes([i])))
events = st.one_of(
    st.tuples(st.just("stored"), keys_st, holders),
    st.tuples(st.just("removed"), keys_st, holders),
)


@given(st.lists(events, max_size=60), st.lists(keys_st, max_size=8, unique=True))
def test_index_equals_a_naive_model(
    history: list[tuple[str, BlockKey, SegmentId]], chain: list[BlockKey]
) -> None:
    """After any history, matches are the leading runs of a plain set of (key, holder) pairs."""
    index = PrefixIndex()
    model: set[tuple[BlockKey, SegmentId]] = set()
    for what, key, holder in history:
        if what == "stored":
            index.stored(key, holder)
            model.add((key, holder))
        else:
            index.removed(key, holder)
            model.discard((key, holder))

    def run(held: set[BlockKey]) -> int:
        return next((i for i, key in enumerate(chain) if key not in held), len(chain))

    match = index.match(chain)
    assert match.pool == run({key for key, _ in model})
    for name in "abcd":
        held = {key for key, holder in model if holder == name}
        assert match.by_holder.get(SegmentId(name), 0) == run(held)
    assert len(index) == len({key for key, _ in model})


def test_a_holder_of_nothing_costs_nothing() -> None:
    """Bits of holders that are gone are used again, however many names come and go."""
    index = PrefixIndex()
    key = BlockKey(bytes(32))
    for i in range(1_000):
        index.stored(key, SegmentId(f"s{i}"))
        index.removed(key, SegmentId(f"s{i}"))
    index.stored(key, SegmentId("last"))
    assert index.match([key]).by_holder == {"last": 1}
    assert index._masks[key] == 1
