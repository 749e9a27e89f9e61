"""Serving: runs of many callers in shared batches, in threads, coroutines and behind an HTTP endpoint."""

from llmppl.serving.service import Call, Service, ServiceFull, ServiceStats

__all__ = ["Call", "Service", "ServiceFull", "ServiceStats"]
