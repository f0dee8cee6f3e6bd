"""The face of the product: deployments, HTTP API, text, telemetry and the command line."""

import os

if os.environ.get("EVENHAND_LOOPBACK") == "1":  # set by the front door for the processes of its cluster
    from serve_app.loopback import keep_grpc_local

    keep_grpc_local()
