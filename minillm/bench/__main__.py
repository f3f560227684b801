"""python -m minillm.bench NAME … is python -m minillm bench NAME …"""

import sys

from minillm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
