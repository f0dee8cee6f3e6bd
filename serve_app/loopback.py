"""Keeps the ports that Serve opens in replicas on loopback, where the front door wants everything to be."""

from __future__ import annotations

from grpc.aio._server import Server  # type: ignore[import-untyped]


def keep_grpc_local() -> None:
    """Bind what this process's gRPC servers would bind to all interfaces to 127.0.0.1 instead.

    Every replica serves calls of other replicas on `[::]`, and Serve has no setting for it. (These calls need
    the cluster's token.) To be called once, before the replica has finished starting.
    """
    add_port = Server.add_insecure_port

    def add_local_port(self: Server, address: str) -> int:
        port: int = add_port(self, address.replace("[::]:", "127.0.0.1:"))
        return port

    Server.add_insecure_port = add_local_port
