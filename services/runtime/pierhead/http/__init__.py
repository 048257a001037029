"""HTTP for a replica: aiohttp and ASGI applications, server-sent events."""
