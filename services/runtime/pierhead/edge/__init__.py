"""What every side of a replica shares: admission, errors as statuses, plain gRPC, logs."""
