"""Functions as deployments, called by handles; keyword arguments; defaults."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
def preprocess(text: str, *, lower: bool = True) -> str:
    return text.strip().lower() if lower else text.strip()


@serve.deployment
async def model(text: str, scale=2):
    return len(text) * scale


@serve.deployment
def words(text: str):
    yield from text.split()


@serve.deployment
class Pipeline:
    def __init__(self, preprocess: DeploymentHandle, model: DeploymentHandle, words: DeploymentHandle):
        self.preprocess, self.model, self.words = preprocess, model, words

    async def __call__(self, text: str):
        clean = self.preprocess.remote(text, lower=False)
        return [
            await clean,
            await self.model.remote(clean, scale=3),
            await self.model.remote(self.preprocess.remote(text)),
        ]

    async def split(self, text):
        return [word async for word in self.words.options(stream=True).remote(text)]

    async def too_many(self):
        try:
            await self.model.remote("a", 1, 2, 3)
        except TypeError as error:
            return "positional argument" in str(error)


app = Pipeline.bind(preprocess.bind(), model.bind(), words.bind())
REQUESTS = []


def calls(handle):
    yield handle.remote("  Hello World ").result()
    yield handle.split.remote("a b").result()
    yield handle.too_many.remote().result()
