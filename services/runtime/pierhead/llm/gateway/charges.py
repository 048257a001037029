"""What each key has used and HAProxy has not been told yet. Pure.

A whole answer tells its own tokens at its head. The head of a stream leaves before its first token is counted, so its
tokens are told with the key's next answer. An estimate at the head would have to be taken back where it was too high,
when HAProxy may have forgotten it: the key could then use that much more.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_KEYS = 10_000
"""Keys of which something is kept: as many as a stack may have. Beyond them, the key that used something longest ago
goes."""


class Charges:
    """Tokens by the name of the key that has used them at this gateway."""

    def __init__(self) -> None:
        self._untold: OrderedDict[str, int] = OrderedDict()

    def add(self, key: str, tokens: int) -> None:
        """The key has used tokens."""
        if not tokens:
            return
        self._untold[key] = self._untold.pop(key, 0) + tokens
        if len(self._untold) > MAX_KEYS:
            self._untold.popitem(last=False)

    def take(self, key: str) -> int:
        """What is to be told of the key now; it is told once."""
        return self._untold.pop(key, 0)
