"""The page pool of the caches: free pages, pages of requests, and pages kept for a prefix that comes again.

This is the host's side of paging; the device sees page tables alone. Target and draft share them: page p of the one and
page p of the other hold the same positions. Prefix reuse is that of SGLang's radix cache, in whole pages. A page is
known by the page before it, its own tokens and the one token behind them. The draft's last entry in a page is made of
that token (`rounds`), so a shared page is right for both caches, and vanilla decoding finds the same pages.

A recurrent target's state belongs to a sequence, not to pages. Copies of it are kept behind some pages, and a prefix is
reused up to the newest page with one.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

_STATE_EVERY = 256  # tokens between kept states, in whole pages; SGLang's `mamba_track_interval`
# The page before, the number of its use, and the tokens: a page that is given away loses the pages behind it.
_Key = tuple[int, int, bytes]


@dataclasses.dataclass
class PageAllocation:
    """The pages of one request, in the order of its positions.

    Attributes:
        pages: all pages of the request. The first ones may be shared with other requests, and are then only read.
        reused: tokens of the prompt whose entries existed already, in whole pages.
        known: the pages that the pool knows by the tokens of the first ones, and the numbers of their use. They may be
            another request's, which wrote the same meanwhile.
        drafted: whether the draft head has read the reused tokens too.
        registering: whether its pages may become findable.
        state: the kept state behind the reused tokens; None: there are none, or the target has no state.
    """

    pages: list[int]
    reused: int
    known: list[tuple[int, int]]
    drafted: bool = True
    registering: bool = True
    state: int | None = None


class PagePool:
    """Pages 1 to `pages`; page 0 is `state.TRASH` and belongs to no request.

    `reuse` keeps the pages of ended requests for prompts that begin alike, until the room is needed. There is room for
    so many copies (`states`) of a recurrent target's state; None: it has none.
    """

    def __init__(self, pages: int, page_size: int, *, reuse: bool = True, states: int | None = None) -> None:
        self.pages, self.page_size, self.reuse, self.states = pages, page_size, reuse, states
        self._free_states = list(range(states or 0))
        self._state_of: collections.OrderedDict[int, int] = collections.OrderedDict()  # of a page, the oldest use first
        self._free = list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)
        self._uses = [0] * (pages + 1)  # times that a page was given to a request as a new one
        self._page: dict[_Key, int] = {}
        self._key: dict[int, _Key] = {}
        self._undrafted: set[int] = set()  # known pages that a resting head has not read
        # Known pages that no request holds, the next to be given away first: a prefix's end before its beginning.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """Pages that a new request may have."""
        return len(self._free) + len(self._idle)

    def cached(self, ids: Sequence[int]) -> int:
        """Tokens of a prompt that `allocate` would reuse now. Any thread may ask."""
        return len(self._match(ids)) * self.page_size

    def allocate(self, ids: Sequence[int], tokens: int) -> PageAllocation | None:
        """Allocates the pages of `tokens` tokens, prompt and answer; None where too few are free.

        The prompt's last token is never reused: the target must read it to choose the next one.
        """
        shared = self._match(ids)
        count = -(-tokens // self.page_size)
        taken = sum(page in self._idle for page in shared)
        if count - len(shared) > self.available - taken:
            return None
        for page in shared:
            self._idle.pop(page, None)
        pages = shared + [self._take() for _ in range(count - len(shared))]
        for page in pages:
            self._holders[page] += 1
        drafted, state = self._undrafted.isdisjoint(shared), None
        if self.states and shared:
            self._state_of.move_to_end(shared[-1])
            state = self._state_of[shared[-1]]
        known = [(page, self._uses[page]) for page in shared]
        return PageAllocation(pages, len(shared) * self.page_size, known, drafted, state=state)

    def next_state(self, read: int) -> int:
        """Returns the number of tokens behind which the next state is kept, for a prompt of which `read` are read."""
        every = -(-_STATE_EVERY // self.page_size) * self.page_size
        return (read // every + 1) * every

    def keep_state(self, allocation: PageAllocation, read: int) -> int | None:
        """Gives the state behind a prompt's first `read` tokens a place, if need be that of the state used longest ago.

        Returns None: no place, or no request would find it there.
        """
        index = read // self.page_size - 1
        page, use = allocation.known[index] if index < len(allocation.known) else (0, 0)
        if not self.states or page not in self._key or self._uses[page] != use or page in self._state_of:
            return None
        if not self._free_states:
            self._drop_state(next(iter(self._state_of)))
        self._state_of[page] = self._free_states.pop()
        return self._state_of[page]

    def _drop_state(self, page: int) -> None:
        if (state := self._state_of.pop(page, None)) is not None:
            self._free_states.append(state)

    def register(self, allocation: PageAllocation, ids: Sequence[int], *, drafted: bool = True) -> None:
        """Makes pages findable whose entries are written, or will be by programs already dispatched.

        Of the request's tokens so far, those of whole pages with a token behind them count. `drafted`: the head has
        read them too.
        """
        known = allocation.known
        while self.reuse and allocation.registering and (len(known) + 1) * self.page_size < len(ids):
            before, use = known[-1] if known else (0, self._uses[0])
            if self._uses[before] != use:  # another request's page, which was given away
                allocation.registering = False
                return
            key, page = self._key_of(before, ids, len(known)), allocation.pages[len(known)]
            if key not in self._page:
                self._page[key], self._key[page] = page, key
                if not (drafted and allocation.drafted):
                    self._undrafted.add(page)
            page = self._page[key]
            known.append((page, self._uses[page]))

    def release(self, allocation: PageAllocation, *, forget: bool = False) -> None:
        """Gives the pages back, once; `forget` makes the entries that this request wrote unfindable."""
        for index, page in reversed(list(enumerate(allocation.pages))):
            self._holders[page] -= 1
            if forget and index * self.page_size >= allocation.reused and page in self._key:
                del self._page[self._key.pop(page)]
                self._drop_state(page)
            if self._holders[page]:
                continue
            if page in self._key:
                self._idle[page] = None
            else:
                self._free.append(page)
        allocation.pages = []

    def forget(self) -> None:
        """Makes all entries unfindable. Allocations that are held must no longer register theirs."""
        self._free += self._idle
        for page in list(self._state_of):
            self._drop_state(page)
        for known in (self._idle, self._page, self._key, self._undrafted):
            known.clear()

    def check_idle(self) -> None:
        """Checks the pool of an idle engine. Raises RuntimeError: a page is lost, or held without a request."""
        held = [page for page, holders in enumerate(self._holders) if holders]
        if held or self.available != self.pages:
            raise RuntimeError(f"pages leaked: {self.available} of {self.pages} are free with no request; held: {held}")

    def _match(self, ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self.page_size < len(ids):
            page = self._page.get(self._key_of(found[-1] if found else 0, ids, len(found)))
            if page is None:
                break
            found.append(page)
        while self.states is not None and found and found[-1] not in self._state_of:
            found.pop()
        return found

    def _key_of(self, before: int, ids: Sequence[int], index: int) -> _Key:
        start = index * self.page_size
        tokens = ids[start : start + self.page_size + 1]
        return before, self._uses[before], b"".join(token.to_bytes(4, "little") for token in tokens)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page[self._key.pop(page)]
            self._drop_state(page)
        self._uses[page] += 1
        self._undrafted.discard(page)
        return page
