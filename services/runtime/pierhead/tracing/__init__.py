"""Traces of requests that failed, were slow or are in the sample: kept, and sent to a collector where one is named."""
