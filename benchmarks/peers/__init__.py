"""Other engines beside ours: the same weights and requests, each engine in an environment of its own, in turns."""
