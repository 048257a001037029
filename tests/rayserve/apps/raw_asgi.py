"""Any ASGI callable as ingress."""

from ray import serve


class Raw:
    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 203, "headers": [(b"x-raw", b"1")]})
        await send({"type": "http.response.body", "body": scope["path"].encode() + b":" + body})


@serve.deployment
@serve.ingress(Raw())
class Ingress:
    pass


app = Ingress.bind()
REQUESTS = [{"method": "POST", "path": "/raw", "body": "abc"}]
