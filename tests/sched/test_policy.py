import pytest

from scheduler import Request
from scheduler.policy import WaitingQueue, order_key


def make(arrival_index: int, priority: int = 0) -> Request:
    return Request(str(arrival_index), [1], 1, priority=priority, arrival_index=arrival_index)


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().arrival_index for _ in range(len(queue))]


def test_fcfs_ignores_priority() -> None:
    queue = WaitingQueue(order_key("fcfs"))
    for request in (make(0, priority=5), make(1, priority=1), make(2, priority=3)):
        queue.push(request)
    assert drain(queue) == [0, 1, 2]


def test_priority_puts_lower_values_first_then_arrival() -> None:
    queue = WaitingQueue(order_key("priority"))
    for request in (make(0, priority=5), make(1, priority=-1), make(2, priority=5), make(3)):
        queue.push(request)
    assert drain(queue) == [1, 3, 0, 2]


def test_a_request_that_comes_back_is_first_again() -> None:
    queue = WaitingQueue(order_key("fcfs"))
    first = make(0)
    for request in (first, make(1), make(2)):
        queue.push(request)
    assert queue.pop() is first
    queue.push(first)
    assert queue.peek() is first
    assert drain(queue) == [0, 1, 2]


def test_removal_anywhere() -> None:
    queue = WaitingQueue(order_key("fcfs"))
    requests = [make(index) for index in range(6)]
    for request in requests:
        queue.push(request)
    for index in (0, 3, 5):
        queue.remove(requests[index])
    assert len(queue) == 3
    assert drain(queue) == [1, 2, 4]
    with pytest.raises(IndexError):
        queue.peek()


def test_removed_requests_do_not_pile_up_behind_the_first() -> None:
    queue = WaitingQueue(order_key("fcfs"))
    queue.push(make(0))
    for index in range(1, 1000):
        request = make(index)
        queue.push(request)
        queue.remove(request)
    assert len(queue) == 1
    assert len(queue._heap) <= 3
    assert len(queue._removed) <= 1
