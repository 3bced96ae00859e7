"""CacheLink: hands a language model's KV cache to another node, or to another model."""

__version__ = "0.1.0"
