"""The tokens that each key is charged, at the head of an answer. Pure.

charge(what it has used, or an estimate) --> owe(what it has used - the estimate), once it has ended
                                                `--> in the key's next charge
"""

from __future__ import annotations

from collections import OrderedDict

MAX_KEYS = 10_000
"""Keys of which something is kept: as many as a stack may have. Beyond them, the key that changed longest ago goes."""


class Charges:
    """What each key still owes at this gateway, in tokens. Charges and debts together are what was used."""

    def __init__(self) -> None:
        self._owed: OrderedDict[str, int] = OrderedDict()

    def charge(self, key: str, tokens: int) -> int:
        """The charge for `tokens` and for what the key owes. It is 0 while the key was charged too much before."""
        due = self.owed(key) + tokens
        charged = max(0, due)
        self._keep(key, due - charged)
        return charged

    def owe(self, key: str, tokens: int) -> None:
        """Add tokens to the key's next charge; a negative number was charged too much."""
        self._keep(key, self.owed(key) + tokens)

    def owed(self, key: str) -> int:
        """What the key's next charge has in addition; negative: how much less it will be."""
        return self._owed.get(key, 0)

    def _keep(self, key: str, owed: int) -> None:
        self._owed.pop(key, None)
        if owed:
            self._owed[key] = owed
        if len(self._owed) > MAX_KEYS:
            self._owed.popitem(last=False)
