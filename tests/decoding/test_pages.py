"""Pages: nothing lost, nothing given twice, and a shared page holds what its request would have written."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.decoding.pages import Lease, PagePool

SIZE = 2


class Device:
    """Remembers what was written to each page: the tokens up to the one behind it, which the draft's entry needs."""

    def __init__(self, pages: int) -> None:
        self.pool = PagePool(pages, SIZE)
        self.written: dict[int, tuple[list[int], int]] = {}
        self.running: list[tuple[Lease, list[int], int]] = []

    def start(self, prompt: list[int], answer: int) -> Lease | None:
        lease = self.pool.lease(prompt, len(prompt) + answer)
        if lease is None:
            return None
        assert len(lease.pages) == -(-(len(prompt) + answer) // SIZE)
        assert lease.reused < len(prompt)  # the last token is always read
        for index in range(lease.reused // SIZE):
            start = index * SIZE
            prefix = prompt[: start + SIZE + 1]
            assert self.written[lease.pages[index]] == (prefix, index)
        own = lease.pages[lease.reused // SIZE :]
        others = [page for other, _, _ in self.running for page in other.pages]
        assert 0 not in lease.pages
        assert not set(own) & set(others)
        self.running.append((lease, prompt, answer))
        self.write(lease, prompt)
        return lease

    def write(self, lease: Lease, tokens: list[int]) -> None:
        for index in range(lease.reused // SIZE, len(lease.pages)):
            prefix = tokens[: (index + 1) * SIZE + 1]
            self.written[lease.pages[index]] = prefix, index
        self.pool.register(lease, tokens)

    def end(self, number: int, forget: bool) -> None:
        lease, prompt, answer = self.running.pop(number % len(self.running))
        if not forget:
            self.write(lease, prompt + [t % 2 for t in range(answer)])
        self.pool.release(lease, forget=forget)
        self.pool.release(lease)  # twice: nothing happens


steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 4)),
        st.tuples(st.just("end"), st.integers(0, 9), st.booleans()),
    ),
    max_size=60,
)


@examples(150)
@given(steps)
def test_any_order_of_joining_and_leaving(steps):
    device = Device(12)
    for step in steps:
        if step[0] == "start":
            _, prompt, answer = step
            if device.start(prompt, answer) is None:
                assert device.pool.available < -(-(len(prompt) + answer) // SIZE)
        elif device.running:
            device.end(step[1], step[2])
        held = {page for lease, _, _ in device.running for page in lease.pages}
        assert device.pool.available == 12 - len(held)
    while device.running:
        device.end(0, False)
    device.pool.check_idle()


def test_a_prefix_is_found_again_but_for_its_last_token_and_where_the_next_one_differs():
    device = Device(20)
    device.start([5, 6, 7, 8, 9], 3)
    assert lease_of(device, [5, 6, 7, 8, 9, 1]).reused == 4
    assert lease_of(device, [5, 6, 7, 8, 9]).reused == 4
    assert lease_of(device, [5, 6, 7, 8]).reused == 2  # behind the second page nothing is known
    assert lease_of(device, [5, 6, 1]).reused == 0  # the draft's entry of 6 is made of the token behind it
    assert lease_of(device, [6, 6, 7, 8, 9]).reused == 0


def test_a_page_that_was_given_away_is_not_what_followers_knew():
    device = Device(12)
    first = lease_of(device, [1, 2, 3]).pages[0]
    assert lease_of(device, [1, 2, 3, 4, 5]).pages[0] == first
    device.end(0, True)
    device.end(0, False)
    assert lease_of(device, [7, 8, 3]).pages[0] == first
    assert lease_of(device, [7, 8, 3, 4, 5, 6]).reused == 2  # not the page of 3, 4 behind 1, 2


def lease_of(device: Device, prompt: list[int]) -> Lease:
    lease = device.start(prompt, 1)
    assert lease is not None
    return lease


def test_the_oldest_known_pages_make_room_the_end_of_a_prefix_first():
    device = Device(4)
    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8], [9, 9, 9]):  # the third takes the free page and the oldest known one
        lease_of(device, prompt)
        device.end(0, False)
        assert device.pool.available == 4
    assert lease_of(device, [1, 2, 3, 4, 5]).reused == 2  # the beginning of the first prompt is still there


def test_without_reuse_nothing_is_found():
    pool = PagePool(9, SIZE, reuse=False)
    for _ in range(2):
        lease = pool.lease([1, 2, 3, 4, 5], 6)
        assert lease is not None
        assert lease.reused == 0
        pool.register(lease, [1, 2, 3, 4, 5])
        pool.release(lease)
    pool.check_idle()


def test_a_leak_is_an_error_at_idle():
    pool = PagePool(9, SIZE)
    assert pool.lease([1], 4) is not None
    with pytest.raises(RuntimeError, match=r"pages leaked: 7 of 9 are free with no request; held: \[1, 2\]"):
        pool.check_idle()
