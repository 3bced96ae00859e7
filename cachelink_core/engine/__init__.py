"""Model runtimes: load, identify, prefill in blocks, answer."""
