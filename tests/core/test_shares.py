"""Equal shares by tenant and by address."""

from __future__ import annotations

from moonserve.core.shares import Party, Shares, extended


def used(*takes: tuple[Party, int]) -> Shares:
    """Shares of which these parties have taken so much."""
    shares = Shares()
    for party, size in takes:
        shares.take(party, size)
    return shares


def test_one_alone_may_use_all_and_no_more() -> None:
    """A party alone is not below its share: the limit is the limit."""
    alone = Party("t", "a")
    assert Shares().limit(16, alone) == 16
    assert used((alone, 16)).limit(16, alone) == 16


def test_names_below_their_share_go_further() -> None:
    """Each of the two names that is below an equal share adds 1/8."""
    shares = used((Party("flood", "a"), 16))
    assert shares.limit(16, Party("calm", "a")) == 18
    assert shares.limit(16, Party("flood", "b")) == 18
    assert shares.limit(16, Party("calm", "b")) == 20


def test_without_a_tenant_the_address_is_the_tenant() -> None:
    """Clients without a tenant share by address, in both reserves."""
    shares = used((Party("", "a"), 16))
    assert shares.limit(16, Party("", "a")) == 16
    assert shares.limit(16, Party("", "b")) == 20


def test_a_tenant_named_like_an_address_is_another() -> None:
    """A client cannot use up the share of another by its address as a tenant's name."""
    shares = used((Party("b", "a"), 16))
    assert shares.limit(16, Party("", "b")) == 20


def test_invented_names_make_no_share_small() -> None:
    """However many names there are, a sixteenth of what is used is a share."""
    shares = used(*((Party(f"t{i}", "a"), 1) for i in range(160)), (Party("calm", "b"), 9))
    assert shares.rank(Party("calm", "b")) == 2
    shares.take(Party("calm", "b"), 3)
    assert shares.rank(Party("calm", "b")) == 1


def test_what_is_given_back_is_forgotten() -> None:
    """The names of parties that use nothing are not kept."""
    shares = used((Party("t", "a"), 3), (Party("", "b"), 2))
    shares.give(Party("t", "a"), 3)
    shares.give(Party("", "b"), 2)
    assert (shares.used, shares._tenants, shares._addresses) == (0, {}, {})


def test_a_small_limit_has_no_reserve() -> None:
    """Below eight places there is nothing to set aside."""
    assert extended(7, 2) == 7
    assert extended(8, 2) == 10
