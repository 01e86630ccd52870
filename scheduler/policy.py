"""Who runs first, and therefore also who is preempted first: the last in the same order."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from scheduler.config import Policy
from scheduler.request import Request

OrderKey = Callable[[Request], tuple[int, int]]


def order_key(policy: Policy) -> OrderKey:
    """The sort key of a policy, unique for each request; the smallest runs first.

    A preempted request keeps its arrival, so that it waits before all that arrived after it.
    """
    match policy:
        case "fcfs":
            return lambda request: (0, request.arrival_index)
        case "priority":
            return lambda request: (request.priority, request.arrival_index)


class WaitingQueue:
    """Requests without a slot, in a policy's order.

    Removal from the middle only notes the request as gone; the heap is rebuilt when most of it is
    gone, so that removal costs O(1) on average and forgotten requests take no memory for long.
    """

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._removed: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def push(self, request: Request) -> None:
        heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request:
        """The first request. IndexError if the queue is empty."""
        while (request := self._heap[0][1]).arrival_index in self._removed:
            heappop(self._heap)
            self._removed.remove(request.arrival_index)
        return request

    def pop(self) -> Request:
        request = self.peek()
        heappop(self._heap)
        return request

    def remove(self, request: Request) -> None:
        """Takes out a request that is in the queue and will not come back."""
        self._removed.add(request.arrival_index)
        if 2 * len(self._removed) > len(self._heap):
            self._heap = [e for e in self._heap if e[1].arrival_index not in self._removed]
            heapify(self._heap)
            self._removed.clear()
