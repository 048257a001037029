"""Names the colours of a picture: `upload` takes it, `decoder` makes an array of it, `classifier` has the model."""

import io

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pierhead import BadRequest, Service, batch, call
from PIL import Image

SIDE = 224
COLOURS = {
    "black": (0, 0, 0), "white": (255, 255, 255), "red": (220, 40, 40), "green": (40, 160, 60),
    "blue": (40, 80, 220), "yellow": (240, 220, 60),
}  # fmt: skip
LARGEST_PIXELS = 50_000_000


class Decoder(Service, max_ongoing_requests=8):
    def decode(self, picture: bytes) -> npt.NDArray[np.uint8]:  # a plain method runs in a thread
        try:
            with Image.open(io.BytesIO(picture)) as image:  # reads the size, and no pixel yet
                if image.width * image.height > LARGEST_PIXELS:
                    raise BadRequest(f"the picture has more than {LARGEST_PIXELS:,} pixels")
                return np.asarray(image.convert("RGB").resize((SIDE, SIDE)))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BadRequest("the body is not a picture that can be read") from error


class Classifier(Service, max_ongoing_requests=64):
    """The nearest colour of each pixel, in place of a model of yours."""

    def __init__(self) -> None:
        self.palette = np.array(list(COLOURS.values()), dtype=np.int16)

    @batch(max_batch_size=16, batch_wait_timeout_s=0.005)
    async def shares(self, pictures: list[npt.NDArray[np.uint8]]) -> list[dict[str, float]]:
        pixels = np.stack(pictures)[:, ::4, ::4].astype(np.int16)
        nearest = np.abs(pixels[..., None, :] - self.palette).sum(axis=-1).argmin(axis=-1)
        counts = [np.bincount(one.ravel(), minlength=len(COLOURS)) for one in nearest]
        return [dict(zip(COLOURS, (count / count.sum()).round(3).tolist(), strict=True)) for count in counts]


web = FastAPI(title="Pictures")


class Upload(Service, route="/", asgi=web):
    def __init__(self, decoder: Decoder, classifier: Classifier) -> None:  # in a replica: handles
        self.decoder = decoder
        self.classifier = classifier

    @web.post("/colours")
    async def colours(self, request: Request) -> dict[str, float]:
        pixels = await call(self.decoder.decode, await request.body())
        shares = await self.classifier.shares(pixels)
        return {name: share for name, share in shares.items() if share > 0}


app = Upload.bind(Decoder.bind(), Classifier.bind())
