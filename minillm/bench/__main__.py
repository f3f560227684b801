"""python -m minillm.bench NAME … is python -m minillm bench NAME …"""

import sys

from minillm.bench import command
from minillm.tools.command_line import Parser, run


def main(arguments: list[str] | None = None) -> int:
    """Run benchmarks; returns the exit code."""
    parser = Parser(prog="python -m minillm.bench", description="Run benchmarks.")
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    return run(lambda: command.run(options))


if __name__ == "__main__":
    sys.exit(main())
