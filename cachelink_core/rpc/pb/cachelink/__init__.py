"""The proto package ``cachelink``, generated."""
