"""Two models in a row, with a builder of the application."""

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment
class Translator:
    def __init__(self, language: str):
        self.language = language
        self.model = str.upper

    def translate(self, text: str) -> str:
        return f"[{self.language}] {self.model(text)}"

    def reconfigure(self, config: dict):
        self.language = config.get("language", self.language)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Summarizer:
    def __init__(self, translator: DeploymentHandle):
        self.translator = translator

    def summarize(self, text: str) -> str:
        return " ".join(text.split()[:3])

    async def __call__(self, http_request: Request) -> str:
        english_text: str = await http_request.json()
        summary = self.summarize(english_text)
        return await self.translator.translate.remote(summary)


def build(args: dict) -> Application:
    return Summarizer.bind(Translator.options(user_config={"language": args["to"]}).bind("en"))


app = build({"to": "fr"})
REQUESTS = [
    {"method": "POST", "path": "/", "json": "It was the best of times"},
    {"method": "POST", "path": "/", "json": {"not": "text"}},
    {"method": "POST", "path": "/", "json": ""},
]


def calls(handle):
    yield handle.summarize.remote("a b c d").result()
