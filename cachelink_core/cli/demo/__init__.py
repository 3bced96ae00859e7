"""``cachelink demo``: two daemons on this machine, one document, every way to hand its cache over.

The processes are what an operator would start; this package is only their client. It measures with
its own clock and with what the nodes report, and checks what it claims.
"""
