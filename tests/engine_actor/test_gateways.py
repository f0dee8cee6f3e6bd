"""The rows of a step on their way to the gateways."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.channel_messages import StepMessage, Submit, SubmitAnswer, pack_request, unpack_answer
from engine_actor.gateways import Gateways
from engine_actor.message_socket import MessageConnection
from engine_actor.request import EngineRequest, RequestUsage, SamplingParams, StreamRow


class Gateway(MessageConnection):
    """One that keeps what is sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def send(self, message: bytes) -> None:
        self.sent.append(unpack_answer(message))

    def submit(self, *names: str) -> None:
        requests = [EngineRequest(name, 1, name, "a", [1], SamplingParams(5)) for name in names]
        self.on_message(pack_request(Submit(1, requests)))
        assert self.sent.pop() == SubmitAnswer(1, None)


def message(rows: tuple[StreamRow, ...]) -> StepMessage:
    return StepMessage("e", 1, 2, 3, rows)


@pytest.fixture
def gateways() -> Gateways:
    return Gateways(lambda requests: None, lambda key: None)


def connected(gateways: Gateways, *names: str) -> Gateway:
    gateway = Gateway()
    gateways.accept(gateway, message(()))
    assert gateway.sent.pop() == message(())
    gateway.submit(*names)
    return gateway


def test_first_tokens_go_to_each_gateway_before_its_other_rows(gateways: Gateways) -> None:
    one, two = connected(gateways, "a", "b", "c"), connected(gateways, "d")
    usage = RequestUsage(1, 0, 1)
    goes_on, ends = StreamRow("a", 1, (5,)), StreamRow("c", 1, (7,), "length", None, usage)
    first, alone = StreamRow("b", 1, (6,), usage=usage), StreamRow("d", 1, (8,), usage=usage)
    gateways.dispatch([goes_on, first, alone, ends, StreamRow("gone", 1, (9,))], message)
    assert one.sent == [message((first,)), message((goes_on, ends))]
    assert two.sent == [message((alone,))]
    assert gateways.live_requests == 3


def test_rows_of_one_request_keep_their_order(gateways: Gateways) -> None:
    one = connected(gateways, "a", "b")
    rows = (
        StreamRow("a", 1, ()),
        StreamRow("a", 1, (5,), usage=RequestUsage(1, 0, 1)),
        StreamRow("b", 1, (6,)),
    )
    gateways.dispatch(rows, message)
    assert one.sent == [message(rows)]
