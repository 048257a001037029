"""Discovery: tells callers where the replicas of services are."""
