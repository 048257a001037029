"""A class whose __call__ is async and reads JSON."""

from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=1)
class Translator:
    def __init__(self, words: dict):
        self.words = words

    async def __call__(self, request: Request):
        text = await request.json()
        return {"translated": [self.words.get(word, word) for word in text["words"]], "count": len(text["words"])}


app = Translator.bind({"one": "eins", "two": "zwei"})
REQUESTS = [
    {"method": "POST", "path": "/", "json": {"words": ["one", "two", "many"]}},
    {"method": "POST", "path": "/", "json": {"wrong": 1}},
    {"method": "POST", "path": "/", "body": "no json"},
]
