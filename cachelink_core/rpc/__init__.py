"""The gRPC layer: the only place that imports grpc and the generated code.

``types`` holds the plain values that daemons and clients speak, ``convert`` turns them into protobuf
and back, ``frames`` frames the one hot message by hand, ``client`` and ``transfer_client`` call,
``handlers`` and ``server`` serve. Nothing here imports torch, so that a client stays light.
"""
