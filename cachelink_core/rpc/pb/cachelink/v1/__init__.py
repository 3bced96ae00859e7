"""The proto package ``cachelink.v1``, generated."""
