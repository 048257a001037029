"""NumPy arrays over handles and as JSON."""

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Model:
    def predict(self, batch: np.ndarray) -> np.ndarray:
        return batch @ np.arange(3)


@serve.deployment
class Ingress:
    def __init__(self, model: DeploymentHandle):
        self.model = model

    async def __call__(self):
        batch = np.ones((2, 3), dtype=np.float32)
        scores = await self.model.predict.remote(batch)
        return {"scores": scores, "best": scores.max(), "count": np.int64(2), "shape": list(scores.shape)}


app = Ingress.bind(Model.bind())
REQUESTS = [{"path": "/"}]
