"""What happened, told outside: spans, metrics and the access log, made from plain records."""
