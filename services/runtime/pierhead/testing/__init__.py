"""For tests of applications: all services in the test's process, or the whole stack in containers.

async with local(shop) as running:                       # no Docker
    assert await running.handle(Scorer).score(3) == 1.5
    async with running.http.get("/shop/recommend?user=3") as response: ...

with Stack("compose.yaml") as stack:                     # Docker; as `pierhead up` starts it
    urllib.request.urlopen(f"{stack.base_url}/shop/recommend?user=3")
"""

from pierhead.testing.local_application import LocalApplication, local
from pierhead.testing.stack import Stack, StackFailed

__all__ = ["LocalApplication", "Stack", "StackFailed", "local"]
