"""Pages: nothing lost, nothing given twice, and a shared page holds what its request would have written."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.decoding.pages import PageAllocation, PagePool

SIZE = 2


class Device:
    """Remembers what was written to each page: the tokens up to the one behind it, which the draft's entry needs."""

    def __init__(self, pages: int, states: int | None = None) -> None:
        self.pool = PagePool(pages, SIZE, states=states)
        self.states: dict[int, list[int]] = {}  # the tokens behind which each was kept
        self.written: dict[int, tuple[list[int], int]] = {}
        self.running: list[tuple[PageAllocation, list[int], int]] = []

    def start(self, prompt: list[int], answer: int) -> PageAllocation | None:
        allocation = self.pool.allocate(prompt, len(prompt) + answer)
        if allocation is None:
            return None
        assert len(allocation.pages) == -(-(len(prompt) + answer) // SIZE)
        assert allocation.reused < len(prompt)  # the last token is always read
        for index in range(allocation.reused // SIZE):
            start = index * SIZE
            prefix = prompt[: start + SIZE + 1]
            assert self.written[allocation.pages[index]] == (prefix, index)
        if self.pool.states is not None and allocation.reused:
            assert allocation.state is not None
            assert self.states[allocation.state] == prompt[: allocation.reused]
        own = allocation.pages[allocation.reused // SIZE :]
        others = [page for other, _, _ in self.running for page in other.pages]
        assert 0 not in allocation.pages
        assert not set(own) & set(others)
        self.running.append((allocation, prompt, answer))
        self.write(allocation, prompt)
        for read in range(allocation.reused + SIZE, len(prompt), SIZE):
            state = self.pool.keep_state(allocation, read)
            if state is not None:
                self.states[state] = prompt[:read]
        return allocation

    def write(self, allocation: PageAllocation, tokens: list[int]) -> None:
        for index in range(allocation.reused // SIZE, len(allocation.pages)):
            prefix = tokens[: (index + 1) * SIZE + 1]
            self.written[allocation.pages[index]] = prefix, index
        self.pool.register(allocation, tokens)

    def end(self, number: int, forget: bool) -> None:
        allocation, prompt, answer = self.running.pop(number % len(self.running))
        if not forget:
            self.write(allocation, prompt + [t % 2 for t in range(answer)])
        self.pool.release(allocation, forget=forget)
        self.pool.release(allocation)  # twice: nothing happens


steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 4)),
        st.tuples(st.just("end"), st.integers(0, 9), st.booleans()),
    ),
    max_size=60,
)


@examples(150)
@given(steps, st.sampled_from([None, 0, 3]))
def test_any_order_of_joining_and_leaving(steps, states):
    device = Device(12, states)
    for step in steps:
        if step[0] == "start":
            _, prompt, answer = step
            if device.start(prompt, answer) is None:
                assert device.pool.available < -(-(len(prompt) + answer) // SIZE)
        elif device.running:
            device.end(step[1], step[2])
        held = {page for allocation, _, _ in device.running for page in allocation.pages}
        assert device.pool.available == 12 - len(held)
    while device.running:
        device.end(0, False)
    device.pool.check_idle()


def test_a_prefix_is_found_again_but_for_its_last_token_and_where_the_next_one_differs():
    device = Device(20)
    device.start([5, 6, 7, 8, 9], 3)
    assert allocation_of(device, [5, 6, 7, 8, 9, 1]).reused == 4
    assert allocation_of(device, [5, 6, 7, 8, 9]).reused == 4
    assert allocation_of(device, [5, 6, 7, 8]).reused == 2  # behind the second page nothing is known
    assert allocation_of(device, [5, 6, 1]).reused == 0  # the draft's entry of 6 is made of the token behind it
    assert allocation_of(device, [6, 6, 7, 8, 9]).reused == 0


def test_a_page_that_was_given_away_is_not_what_followers_knew():
    device = Device(12)
    first = allocation_of(device, [1, 2, 3]).pages[0]
    assert allocation_of(device, [1, 2, 3, 4, 5]).pages[0] == first
    device.end(0, True)
    device.end(0, False)
    assert allocation_of(device, [7, 8, 3]).pages[0] == first
    assert allocation_of(device, [7, 8, 3, 4, 5, 6]).reused == 2  # not the page of 3, 4 behind 1, 2


def allocation_of(device: Device, prompt: list[int]) -> PageAllocation:
    allocation = device.start(prompt, 1)
    assert allocation is not None
    return allocation


def test_the_oldest_known_pages_make_room_the_end_of_a_prefix_first():
    device = Device(4)
    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8], [9, 9, 9]):  # the third takes the free page and the oldest known one
        allocation_of(device, prompt)
        device.end(0, False)
        assert device.pool.available == 4
    assert allocation_of(device, [1, 2, 3, 4, 5]).reused == 2  # the beginning of the first prompt is still there


def test_a_prefix_is_reused_up_to_the_newest_state():
    """That of the page which another request wrote too; the one used longest ago makes room."""
    device = Device(30, states=2)
    assert allocation_of(device, [1, 2, 3, 4, 5, 6, 7]).reused == 0  # keeps states behind 2, 4 and 6 tokens in turn
    assert allocation_of(device, [1, 2, 3, 4, 5, 9]).reused == 4
    assert allocation_of(device, [1, 2, 3, 9]).reused == 0  # its state went first; it is kept again, not that behind 6
    assert allocation_of(device, [1, 2, 3, 4, 5, 6, 7]).reused == 4
    assert allocation_of(device, [1, 2, 3, 4, 5, 6, 7]).reused == 6
    device.pool.forget()
    assert allocation_of(device, [1, 2, 3, 4, 5, 6, 7]).reused == 0


def test_a_page_that_was_given_away_leads_no_prefix_on():
    """Two requests write the same at once, so that one knows the other's page; a third takes that page."""
    pool = PagePool(5, SIZE)
    first, second = pool.allocate([1, 2, 3], 3), pool.allocate([1, 2, 3, 4, 5], 6)
    assert first is not None and second is not None
    for allocation in (first, second):
        pool.register(allocation, [1, 2, 3])
    pool.release(first)
    third = pool.allocate([0, 0, 7, 8, 3], 4)
    assert third is not None and third.pages[1] == second.known[0][0]
    pool.register(third, [0, 0, 7, 8, 3])
    pool.register(second, [1, 2, 3, 4, 5])
    assert pool.cached([0, 0, 7, 8, 3, 4, 5, 6]) == 2 * SIZE  # not the page of 3, 4 behind 1, 2


def test_without_reuse_nothing_is_found():
    pool = PagePool(9, SIZE, reuse=False)
    for _ in range(2):
        allocation = pool.allocate([1, 2, 3, 4, 5], 6)
        assert allocation is not None and allocation.reused == 0
        pool.register(allocation, [1, 2, 3, 4, 5])
        pool.release(allocation)
    pool.check_idle()


def test_a_leak_is_an_error_at_idle():
    pool = PagePool(9, SIZE)
    assert pool.allocate([1], 4) is not None
    with pytest.raises(RuntimeError, match=r"pages leaked: 7 of 9 are free with no request; held: \[1, 2\]"):
        pool.check_idle()
