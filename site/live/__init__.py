"""What the live pages ask: each element is a few controls and a function that draws HTML.

The same functions draw the first picture when the site is built and every further one in the
reader's browser. Nothing here needs more than the standard library and `minillm`.
"""
