"""What the whole package uses and no lesson is about: checks, folders, devices, plots."""
