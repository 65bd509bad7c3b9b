"""Block keys and the prefix index."""

from hashlib import sha256

from moonserve.core.kv.keys import Namespace, chain_keys, tail_key, token_bytes

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


def test_a_salt_is_the_namespaces() -> None:
    """Without one the root is the plain one."""
    plain, salted = Namespace("m", "r", "l", 4), Namespace("m", "r", "l", 4, tenant_salt="s")
    assert plain.salted("s") == salted.root()
    assert plain.salted("") == plain.root()


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
