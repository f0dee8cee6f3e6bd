"""The face of the product: deployments, HTTP API, text, telemetry and the command line."""
