"""Many requests at once: from one request's states to the engine and its metrics."""
