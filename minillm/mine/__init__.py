"""What the reader builds stays: `kept.keep(function)` writes it to the folder `mine/`."""
