"""How the site is made of the repository: pages staged for Sphinx, Python packed for browsers."""
