"""Settings that a deployment does not take: `serve.run` raises."""

from ray import serve


@serve.deployment
def fine():
    return "fine"


@serve.deployment(user_config={"a": 1})
class Without:
    pass


@serve.deployment(user_config={"a": 1})
class Raises:
    def reconfigure(self, config):
        raise ValueError(config)


@serve.deployment(user_config={"a": 1})
def function():
    return "function"


app = fine.bind()
REQUESTS = [{"path": "/"}]


def calls(handle):
    for number, target in enumerate((Without, Raises, function)):
        name = f"bad{number}"
        try:
            serve.run(target.bind(), name=name, route_prefix=f"/{name}")
            yield "fine"
        except Exception as error:
            yield type(error).__name__
        serve.delete(name)
    yield handle.remote().result()
