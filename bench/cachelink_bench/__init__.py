"""Benchmarks of CacheLink."""
