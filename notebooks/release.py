"""python release.py NAME …, in the folder of a course: releases several assignments.

As `nbgrader generate_assignment NAME --create` does for each, but nbgrader, which takes seconds to
start, starts once. `make course` calls it.
"""

import sys

# jsonschema builds this grammar of web addresses, for seconds, whenever a notebook is to be read.
sys.modules.setdefault("rfc3987_syntax", None)

from nbgrader.apps import GenerateAssignmentApp  # noqa: E402

for name in sys.argv[1:]:
    GenerateAssignmentApp.clear_instance()
    GenerateAssignmentApp.launch_instance([name, "--create", "--log-level=WARN"])
