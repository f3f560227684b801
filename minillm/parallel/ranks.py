"""Ranks of this machine, each a process of its own: for a command, or for a notebook's functions.

A rank shares no memory with the notebook. It gets the source of the functions, calls the last of
them, and what this returns comes back as JSON, in which the keys of a dictionary are texts.
"""

import ctypes
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PREAMBLE = """import json, os, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
"""
END = """
if dist.is_initialized():
    dist.destroy_process_group()
"""


def on_ranks(
    n: int, program: Callable[..., Any], *helpers: Callable[..., Any], **given: Any
) -> list[Any]:
    """Start n ranks that call program(**given); returns what each returned, rank 0 first.

    The functions find json, os, sys, time, torch, `dist` (torch.distributed) and `F`
    (torch.nn.functional); what else they need they import. A rank has one thread and no GPU.
    RuntimeError, with the cause in one sentence, if a rank fails.
    """
    functions = "\n\n".join(inspect.getsource(f) for f in (*helpers, program))
    call = f"{program.__name__}(**{given!r})"
    keep = f"json.dump({call}, open(sys.argv[1] + os.environ['RANK'], 'w'))\n"
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(f"{PREAMBLE}\n{functions}\n{keep}{END}", encoding="utf-8")
        _start(n, [str(script), folder + "/"], os.environ | alone, stdout=subprocess.DEVNULL)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(n)]


def run_command(n: int, *command: str) -> None:
    """Run `python -m command` on n ranks until they end; whatever ends this process ends them.

    Each gets its share of the machine's cores, unless OMP_NUM_THREADS says otherwise.
    RuntimeError, with the cause in one sentence, if a rank fails.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // n))}
    _start(n, ["-m", *command], threads | os.environ)


def _start(n: int, command: list[str], env: dict[str, str], stdout: int | None = None) -> None:
    """Start torchrun, and wait until it ends; stdout: as for subprocess, None is this process's."""
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={n}", *command],
        env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone
        preexec_fn=_end_with_parent,
    ) as ranks:  # fmt: skip
        try:
            _, report = ranks.communicate()
        except BaseException:  # Ctrl-C, SIGTERM
            ranks.terminate()  # torchrun tells the ranks, and waits until they have ended
            while ranks.poll() is None:
                with suppress(KeyboardInterrupt, SystemExit):  # a second Ctrl-C: it is on its way
                    ranks.communicate()
            raise
    if ranks.returncode:
        raise RuntimeError(cause(report))


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # a new process only calls it


def _end_with_parent() -> None:
    """Let SIGTERM end this process when its parent is gone, however that was ended; Linux only."""
    if _LIBC is not None:
        pr_set_pdeathsig = 1
        _LIBC.prctl(pr_set_pdeathsig, signal.SIGTERM)


def cause(report: str) -> str:
    """What ended the ranks, in one sentence, from all that they and torchrun have said.

    A rank that knows says it as any command does, often several of them the same. One that was
    ended from outside says nothing: the others only miss it, and torchrun says how it ended.
    """
    report = re.sub(r"^.*(?:(?:closed|reset) by peer|Broken pipe).*$", "", report, flags=re.M)
    told = re.search(r"^minillm: (.*)$", report, re.M)
    if told:
        # gloo and NCCL put the place in their source first.
        return re.sub(r"^\[[^]]*\] *", "", told[1])
    raised = re.search(
        r"^(?:\[rank\d+\]: ?)?(\w+(?:\.\w+)*(?:Error|Exception): \S.*)$", report, re.M
    )
    first = report.partition("Root Cause")[2] or report
    ended = re.search(r"traceback : (Signal .*)$", first, re.M) or re.search(
        r"exitcode +: (.*)$", first, re.M
    )
    how = next((found[1].strip() for found in (raised, ended) if found), "torchrun failed")
    return f"A rank ended before the others ({how}); look at its memory, or start again."
