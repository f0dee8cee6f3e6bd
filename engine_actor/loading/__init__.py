"""From a model's name to its configuration and weights. `source`, `config` and `gguf_header` do not import
torch."""
