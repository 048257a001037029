"""Traces of requests: kept for those that failed, were slow, or are in the sample; exported where a collector is named."""
