"""nbgrader's settings for a course of these lessons; `make course` copies them into its folder."""

import os

c = get_config()  # noqa: F821, nbgrader provides it

c.CourseDirectory.course_id = "minillm"
# Where releases and submissions are exchanged; on a hub, a folder that all its users can write to.
c.Exchange.root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "exchange")
# A lesson takes about a minute alone, and several times as long on a busy machine.
c.ExecutePreprocessor.timeout = 600
c.ClearSolutions.code_stub = {
    "python": "# YOUR CODE HERE\n"
    'raise NotImplementedError("Replace these lines; the text above says what is wanted.")'
}

# The kernels that run submissions inherit these. Idle threads would slow their neighbours down,
# and figures of learners do not belong among the course's own.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MINILLM_FIGURES", "build/figures")
