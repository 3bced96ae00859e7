"""Transport: one model's cache translated into another's, learned offline, applied per token.

A mapper is Ridge (affine, one GEMM per target layer and kind) plus, if trained, a residual. It reads
the sender's content-space keys and its values and gives the receiver's; positions are put back with
the receiver's own RoPE, outside of here. Source: CacheLink, sections 3.2 and 5.
"""
