"""What every room uses and no lesson is about: checks, folders, devices, plots."""
