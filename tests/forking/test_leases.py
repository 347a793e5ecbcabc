"""Leases by a model: whoever reads under one and finds its epoch unchanged has read one version."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorlift.errors import RequestError
from tensorlift.forking.leases import Lease, LeaseRefusedError, Leases


def refused(leases: Leases, now: float, reason: str) -> float | None:
    with pytest.raises(LeaseRefusedError) as caught:
        leases.grant(10, now)
    assert caught.value.reason == reason
    return caught.value.retry_seconds


def test_a_limit_of_readers() -> None:
    leases = Leases(2, 60)
    first = leases.grant(10, 0.0)
    leases.grant(20, 0.0)
    assert refused(leases, 4.0, "full") == 6.0  # when the first lapses
    leases.release(first.id)
    leases.grant(10, 4.0)
    assert leases.live(13.9) == 2
    assert leases.live(14.0) == 1
    assert leases.live(20.0) == 0
    assert leases.refused == 1


def test_no_lease_is_longer_than_the_longest() -> None:
    leases = Leases(1, 60)
    lease = leases.grant(1e9, 5.0)
    assert lease.until == 65.0
    assert leases.renew(lease.id, 1e9, 30.0) == Lease(lease.id, 0, 90.0)


def test_what_lapsed_is_not_renewed() -> None:
    leases = Leases(1, 60)
    lease = leases.grant(10, 0.0)
    with pytest.raises(LeaseRefusedError, match="lapsed"):
        leases.renew(lease.id, 10, 10.0)
    with pytest.raises(LeaseRefusedError, match="lapsed"):
        leases.renew("stranger", 10, 0.0)
    leases.release("stranger")


def test_an_update() -> None:
    leases = Leases(5, 60)
    lease = leases.grant(10, 0.0)
    leases.begin_update()
    with pytest.raises(RequestError, match="one update at a time"):
        leases.begin_update()
    assert refused(leases, 1.0, "updating") == 0.1
    assert leases.renew(lease.id, 10, 5.0) == lease  # it may end what it does, no longer
    assert leases.live(10.0) == 0
    leases.move_on()
    leases.end_update()
    assert leases.grant(10, 11.0).epoch == 1
    with pytest.raises(LeaseRefusedError, match="lapsed"):
        leases.renew(lease.id, 10, 9.0)


def test_closed() -> None:
    leases = Leases(5, 60)
    lease = leases.grant(10, 0.0)
    leases.close()
    assert refused(leases, 1.0, "closed") is None
    assert leases.renew(lease.id, 60, 1.0).until == 10.0
    with pytest.raises(RequestError, match="this seed is closed"):
        leases.begin_update()


class Readers(RuleBasedStateMachine):
    """Readers that read slowly and stop, and an owner that writes: what is accepted is of one version."""

    def __init__(self) -> None:
        super().__init__()
        self.leases, self.now = Leases(3, 20), 0.0
        self.version = 0  # of the memory; changes only between move_on() and end_update()
        self.updating = self.moved = False
        self.readers: dict[str, tuple[Lease, set[int]]] = {}
        self.accepted = 0

    def one(self, data: st.DataObject) -> str:
        # By number: the ids are random, and an example has to be the same when it is played again.
        return list(self.readers)[data.draw(st.integers(0, len(self.readers) - 1))]

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.floats(1, 40))
    def begin(self, seconds: float) -> None:
        try:
            lease = self.leases.grant(seconds, self.now)
        except LeaseRefusedError:
            return
        assert not self.updating
        self.readers[lease.id] = (lease, {self.version})

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_on(self, data: st.DataObject) -> None:
        # It looks at no clock: it may have been stopped.
        self.readers[self.one(data)][1].add(self.version)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), seconds=st.floats(1, 40))
    def renew(self, data: st.DataObject, seconds: float) -> None:
        id = self.one(data)
        try:
            lease = self.leases.renew(id, seconds, self.now)
        except LeaseRefusedError:
            del self.readers[id]  # starts again
        else:
            self.readers[id] = (lease, self.readers[id][1])

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        id = self.one(data)
        lease, seen = self.readers.pop(id)
        if self.leases.epoch == lease.epoch:
            assert len(seen) == 1, "a torn read was accepted"
            self.accepted += 1
        self.leases.release(id)

    @precondition(lambda self: not self.updating)
    @rule()
    def begin_update(self) -> None:
        self.leases.begin_update()
        self.updating = True

    @precondition(lambda self: self.updating and not self.moved)
    @rule()
    def move_on(self) -> None:
        """Whether readers are left or not: that is the timeout of an update."""
        self.leases.move_on()
        self.moved = True

    @precondition(lambda self: self.moved)
    @rule()
    def write(self) -> None:
        self.version += 1

    @precondition(lambda self: self.moved)
    @rule()
    def end_update(self) -> None:
        self.leases.end_update()
        self.updating = self.moved = False

    @invariant()
    def few_readers(self) -> None:
        assert self.leases.live(self.now) <= 3


TestReaders = Readers.TestCase
TestReaders.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
