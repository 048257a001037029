"""A gRPC client that knows nothing but an address, as grpcurl: `python -m tests.harness.reflecting_client ADDRESS`.

    ADDRESS                                    the services there
    ADDRESS package.Service/Method REQUEST     a call; REQUEST and each reply, one a line, are JSON
    ADDRESS ... --through OTHER                the same call at another address, described by the first one

Messages are described by the server itself (grpc.reflection.v1alpha) and made at run time. No stub and nothing of the
runtime is used, as the last line on standard error says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

TIMEOUT_S = 30.0


def services(address: str) -> list[str]:
    """What a server says that it serves."""
    with grpc.insecure_channel(address) as channel:
        return sorted(ProtoReflectionDescriptorDatabase(channel).get_services())


def call(described_at: str, address: str, method: str, request: str) -> Iterator[str]:
    """Call `package.Service/Method`; requests and replies are JSON. Raises grpc.RpcError, KeyError for no such one."""
    service, _, name = method.rpartition("/")
    with grpc.insecure_channel(described_at) as describing, grpc.insecure_channel(address) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(describing))
        found = pool.FindServiceByName(service).methods_by_name[name]
        request_class: Any = message_factory.GetMessageClass(found.input_type)
        reply_class: Any = message_factory.GetMessageClass(found.output_type)
        kind = channel.unary_stream if found.server_streaming else channel.unary_unary
        start: Any = kind(f"/{method}", request_class.SerializeToString, reply_class.FromString)
        replies = start(json_format.Parse(request, request_class()), timeout=TIMEOUT_S)
        for reply in replies if found.server_streaming else [replies]:
            yield json_format.MessageToJson(reply, indent=None)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("method", nargs="?")
    parser.add_argument("request", nargs="?", default="{}")
    parser.add_argument("--through")
    a = parser.parse_args()
    try:
        lines = (
            services(a.address) if a.method is None else call(a.address, a.through or a.address, a.method, a.request)
        )
        for line in lines:
            print(line)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}")
        raise SystemExit(1) from None
    finally:
        ours = sorted(name for name in sys.modules if name.split(".")[0] in ("pierhead", "services"))
        print(f"modules of ours: {ours}", file=sys.stderr)


if __name__ == "__main__":
    main()
