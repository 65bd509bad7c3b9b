"""The summary of prefixes: what requests share, and who holds it."""

from __future__ import annotations

from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.prefix_tree import PrefixNode, PrefixTree
from moonserve.core.units import BlockKey, SegmentId

A, B = SegmentId("a"), SegmentId("b")


def chain(text: str) -> list[BlockKey]:
    """Keys named by all that comes before them."""
    return [BlockKey(text[: at + 1].encode()) for at in range(len(text))]


def tree(*texts: str) -> PrefixTree:
    """Requests for these chains, of blocks of 10 tokens."""
    made = PrefixTree(10)
    for text in texts:
        made.add(chain(text))
    return made


def by_key(nodes: list[PrefixNode]) -> dict[str, PrefixNode]:
    """Nodes by the names of their first blocks."""
    return {node.key.decode(): node for node in nodes}


def test_shared_blocks_are_one_node() -> None:
    """A node ends where requests part; each comes after its parent; requests are counted."""
    index = PrefixIndex()
    nodes = list(tree("abcd", "abcd", "abxyz", "q").nodes(index, 99))
    found = by_key(nodes)
    assert {key: (it.tokens, it.requests) for key, it in found.items()} == {
        "a": (20, 3),
        "abc": (20, 2),
        "abx": (30, 1),
        "q": (10, 1),
    }
    assert found["abc"].parent == found["a"].id == found["abx"].parent
    assert found["a"].parent is found["q"].parent is None
    assert [node.id for node in nodes] == [0, 1, 2, 3]
    assert all(it.parent is None or it.parent < it.id for it in nodes)
    assert all((it.held_tokens, it.holders) == (0, 0) for it in nodes)


def test_who_holds_a_node() -> None:
    """By anyone: its leading tokens; whole: with all before it, by tier."""
    index = PrefixIndex()
    index.stored(A, chain("abc"), None, "device")
    index.stored(B, chain("abcd"), None, "dram")
    index.stored(B, chain("ab"), None, "disk")
    found = by_key(list(tree("abcd", "abx").nodes(index, 99)))
    first, second, other = found["a"], found["abc"], found["abx"]
    assert (first.held_tokens, first.holders, first.devices, first.on_disk) == (20, 2, 1, 1)
    assert (second.held_tokens, second.holders, second.devices, second.on_disk) == (20, 1, 0, 0)
    assert (other.held_tokens, other.holders) == (0, 0)


def test_the_nodes_that_save_most_come_first() -> None:
    """A bound keeps those with the most tokens times requests; a child never without its parent."""
    made = tree("a" * 50, "bc", "bc", "bc", "bc", "b" + "x" * 9, *"defgh")
    nodes = list(made.nodes(PrefixIndex(), 3))
    assert [(it.tokens, it.requests) for it in nodes] == [(500, 1), (10, 5), (90, 1)]
    assert made.requests == 11
