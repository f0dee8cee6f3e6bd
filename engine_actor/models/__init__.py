"""Decoder definitions, one file per model family, over an attention backend."""
