"""Starting again after an interrupt: nothing is lost, whatever was half done.

A request carries all that is known of it: what it has produced is in `ids`. All else, blocks and
tables and queues, is made anew from the requests. So Ctrl-C, or an error anywhere in a step, costs
the work of that step and of the caches, and no token is lost or changed.

    Recovery    guards every change of the engine's state
    restarted   the requests sorted anew: those that are over, all others into the queue
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from minillm.serving.request import Request
from minillm.serving.scheduler import Scheduler


class Recovery:
    """restore: makes the state anew from the requests."""

    def __init__(self, restore: Callable[[], None]):
        self._restore, self._in_order = restore, True
        self.guarding = False  # within a guarded block

    @contextmanager
    def guard(self) -> Iterator[None]:
        """If the block is left by an exception, start again from the requests.

        If that is interrupted too, the next call does it.
        """
        if not self._in_order:
            self.restore()
        self._in_order = False
        outer, self.guarding = self.guarding, True
        try:
            yield
        except BaseException:
            self.restore()
            raise
        finally:
            self.guarding = outer
        self._in_order = True

    def restore(self) -> None:
        """Start again from the requests."""
        self._restore()
        self._in_order = True


def restarted(requests: Sequence[Request], scheduler: Scheduler) -> list[Request]:
    """Queue all requests that are not over; returns the others, first those fully delivered."""
    for request in requests:
        if not request.finish_reason and request.reached:  # interrupted just before its end
            request.ended_at = request.times[request.n_produced - 1]
            request.finish_reason = request.reached
    scheduler.restart(request for request in requests if not request.finish_reason)
    ended = [request for request in requests if request.finish_reason]
    return sorted(ended, key=lambda request: not request.all_delivered)
