"""What answers over HTTP: the server, and the one thread that runs the model for it."""
