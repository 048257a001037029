"""reconfigure gets user_config before the first request."""

from ray import serve
from starlette.requests import Request


@serve.deployment(user_config={"threshold": 0.5, "labels": ["a", "b"]})
class Classifier:
    def __init__(self, name):
        self.name = name
        self.history = []

    def reconfigure(self, config):
        self.threshold = config["threshold"]
        self.labels = config["labels"]
        self.history.append(dict(config))

    def __call__(self, request: Request):
        score = float(request.query_params["score"])
        return {"label": self.labels[score > self.threshold], "configs": len(self.history), "name": self.name}


app = Classifier.options(user_config={"threshold": 0.7, "labels": ["low", "high"]}).bind("c")
REQUESTS = [{"path": "/?score=0.6"}, {"path": "/?score=0.9"}]
