"""What constructor arguments and closures are copies of."""

from ray import serve

SHARED = {"count": 0}


class Settings:
    def __init__(self):
        self.values = [1]


settings = Settings()


@serve.deployment
class Stateful:
    total = 0

    def __init__(self, settings: Settings, items: list):
        self.settings = settings
        self.items = items
        settings.values.append(2)

    def __call__(self, more):
        self.items.append(more)
        more.append("callee")
        return [self.items, self.settings.values]

    def give(self):
        return self.items


items = [["first"]]
app = Stateful.bind(settings, items)
REQUESTS = []


def calls(handle):
    more = ["caller"]
    yield handle.remote(more).result()
    yield [more, items, settings.values]
    got = handle.give.remote().result()
    got.append("changed")
    yield len(handle.give.remote().result())
