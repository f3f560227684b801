"""A small model that learns a large one's habits."""
