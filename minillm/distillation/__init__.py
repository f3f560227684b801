"""A small model that learns to imitate a large one."""
