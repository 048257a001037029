"""A process that serves gRPC starts others: by `os.fork`, as multiprocessing does, and by uvloop, which forks, too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BUSY = """
import asyncio, os, sys
import pierhead
import grpc, uvloop

FORKS = 60

class Answers(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            return request
        return grpc.unary_unary_rpc_method_handler(answer)

async def forked():
    if (pid := os.fork()) == 0:
        os._exit(0)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        await asyncio.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])

async def executed():
    process = await asyncio.create_subprocess_exec("true")
    return await process.wait()

async def ask(method):
    while True:
        await method(b"x")

async def main(start):
    server = grpc.aio.server(handlers=[Answers()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        callers = [asyncio.create_task(ask(channel.unary_unary("/a/b"))) for _ in range(4)]
        codes = {await start() for _ in range(FORKS)}
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
    await server.stop(None)
    print(codes)

(asyncio.run if sys.argv[1] == "forked" else uvloop.run)(main(globals()[sys.argv[1]]))
"""


@pytest.mark.parametrize("how", ["forked", "executed"])
def test_children_of_a_process_with_busy_grpc_end_well(how: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-W", "ignore", "-c", BUSY, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=25, check=False)
    assert done.stdout == "{0}\n", done.stderr
