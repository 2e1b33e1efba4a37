"""Pages of the caches: which are free, which a request holds, which are kept for a prefix that comes again.

The host's side of paging; the device only sees page tables. Target and draft share them: page p of the one and page p
of the other hold the same positions. Prefix reuse is that of SGLang's radix cache, in whole pages. A page is known by
the page before it, its own tokens and the one token behind them: the draft's last entry in a page is made of that
token (`rounds`), so what is shared is right for both caches, and vanilla decoding finds the same pages.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

# The page before and which of its uses, and the tokens: a page that is given away is no longer what followers knew.
_Key = tuple[int, int, bytes]


@dataclasses.dataclass
class PageAllocation:
    """The pages of one request, in the order of its positions.

    Attributes:
        pages: all of them; those in front may be shared with other requests and are only read.
        reused: tokens whose entries were there already: whole pages of the prompt.
        known: pages in front that the pool knows by their tokens.
        drafted: the draft head, too, has read all that was there already.
    """

    pages: list[int]
    reused: int
    known: int
    drafted: bool = True
    registering: bool = True


class PagePool:
    """Pages 1 to `pages`; page 0 is `state.TRASH` and belongs to nobody.

    Args:
        reuse: keep the pages of ended requests for prompts that begin alike, until their room is needed.
    """

    def __init__(self, pages: int, page_size: int, *, reuse: bool = True) -> None:
        self.pages, self.page_size, self.reuse = pages, page_size, reuse
        self._free = list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)
        self._uses = [0] * (pages + 1)  # how often a page was given to a request of its own
        self._page: dict[_Key, int] = {}
        self._key: dict[int, _Key] = {}
        self._undrafted: set[int] = set()  # known pages that a resting head has not read
        # Known pages that nobody holds, the next to be given away first: the end of a prefix before its beginning.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """Pages that a new request may have."""
        return len(self._free) + len(self._idle)

    def allocate(self, ids: Sequence[int], tokens: int) -> PageAllocation | None:
        """Pages for a prompt and what follows it, for `tokens` in all; None where there are not enough now.

        The prompt's last token is never reused: the target has to be asked for what follows it.
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
        drafted = self._undrafted.isdisjoint(shared)
        return PageAllocation(pages, len(shared) * self.page_size, len(shared), drafted)

    def register(self, allocation: PageAllocation, ids: Sequence[int], *, drafted: bool = True) -> None:
        """Makes pages findable whose entries are written, or will be by what the device was already told to do.

        Args:
            ids: the request's tokens so far; those of whole pages with a token behind them count.
            drafted: the draft head has read them, too.
        """
        while self.reuse and allocation.registering and (allocation.known + 1) * self.page_size < len(ids):
            key = self._key_of(allocation.pages[allocation.known - 1] if allocation.known else 0, ids, allocation.known)
            page = allocation.pages[allocation.known]
            if key in self._page:  # another request wrote the same meanwhile: this one's stay its own
                allocation.registering = False
                return
            self._page[key], self._key[page] = page, key
            if not (drafted and allocation.drafted):
                self._undrafted.add(page)
            allocation.known += 1

    def release(self, allocation: PageAllocation, *, forget: bool = False) -> None:
        """Gives the pages back. An allocation that was given back is empty, so that doing it twice does nothing.

        Args:
            forget: what this request wrote is not to be found again.
        """
        for index, page in reversed(list(enumerate(allocation.pages))):
            self._holders[page] -= 1
            if forget and index * self.page_size >= allocation.reused and page in self._key:
                del self._page[self._key.pop(page)]
            if self._holders[page]:
                continue
            if page in self._key:
                self._idle[page] = None
            else:
                self._free.append(page)
        allocation.pages = []

    def check_idle(self) -> None:
        """Raises RuntimeError where a page is lost or held although no request is there."""
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
        self._uses[page] += 1
        self._undrafted.discard(page)
        return page
