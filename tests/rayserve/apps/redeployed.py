"""An application that is run again: its calls wait for the new one. Constructors run at the same time."""

import asyncio
import threading
import time

from ray import serve


@serve.deployment(graceful_shutdown_wait_loop_s=0.1)
class Child:
    async def __init__(self):
        parent = serve.get_deployment_handle("Parent", "default")
        self.word = await parent.word.remote()

    def get(self):
        return self.word


@serve.deployment(graceful_shutdown_wait_loop_s=0.1)
class Parent:
    async def __init__(self, child, version):
        self.child = child
        self.version = version
        await asyncio.sleep(0.5)

    def word(self):
        return f"word of {self.version}"

    async def __call__(self, request=None):
        return [self.version, await self.child.get.remote()]


app = Parent.bind(Child.bind(), "v1")
REQUESTS = [{"path": "/"}]


def calls(handle):
    answers, over = [], threading.Event()

    def ask():
        while not over.is_set():
            try:
                answers.append(handle.remote().result(timeout_s=60))
            except Exception as error:
                answers.append(repr(error))

    asking = threading.Thread(target=ask)
    asking.start()
    while not answers:
        time.sleep(0.01)
    serve.run(Parent.bind(Child.bind(), "v2"))
    yield serve.get_app_handle("default").remote().result()
    over.set()
    asking.join()
    yield [answers[0], answers[-1], len({answer[0] for answer in answers})]
