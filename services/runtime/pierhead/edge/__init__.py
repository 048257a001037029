"""Shared by the HTTP, gRPC and lane sides of a replica: admission, errors as statuses, plain gRPC, logs."""
