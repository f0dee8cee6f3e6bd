"""What gateways and a fair queue say to each other, in MessagePack. Both ways messages go as they come: a gateway has
one connection for all its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine_actor.message_socket import fields_of, pack, unpack
from policies.fair_queue import TenantSnapshot
from policies.guardrails import ProtectionLines
from policies.output_length import OutputLength
from policies.tickets import Grant, Refusal, Ticket


class Withdraw(NamedTuple):
    """The client of a ticket has gone, or its grant will not be used."""

    request: str
    attempt: int


class Tell(NamedTuple):
    """The gateway is there. It brings its protection lines, which may change any time, and (tenant, output tokens) of
    the sequences that ended by themselves since it said so last. A snapshot answers."""

    lines: ProtectionLines
    output_lengths: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class QueueSnapshot:
    """For metrics and readiness."""

    queue_epoch: int
    engines: tuple[str, ...]
    queued: int
    tenants: dict[str, TenantSnapshot] = field(default_factory=dict)
    protection_step: int = 0
    output_lengths: dict[str, OutputLength] = field(default_factory=dict)


def pack_question(message: Ticket | Withdraw | Tell) -> bytes:
    """A message of a gateway; a ticket asks for entry."""
    if isinstance(message, Ticket):
        return pack(("ticket", *fields_of(message)))
    return pack(("withdraw" if isinstance(message, Withdraw) else "tell", *message))


def unpack_question(data: bytes) -> Ticket | Withdraw | Tell:
    """The message of `pack_question`. Raises ValueError or TypeError."""
    kind, *values = unpack(data)
    if kind == "ticket":
        return Ticket(*values)
    if kind == "withdraw":
        return Withdraw(*values)
    if kind == "tell":
        lines, output_lengths = values
        return Tell(ProtectionLines(*lines), output_lengths)
    raise ValueError(f"no such message: {kind}")


def pack_reply(message: Grant | Refusal | QueueSnapshot) -> bytes:
    """A message of the queue."""
    return pack((type(message).__name__, *fields_of(message)))


def unpack_reply(data: bytes) -> Grant | Refusal | QueueSnapshot:
    """The message of `pack_reply`. Raises ValueError or TypeError."""
    kind, *values = unpack(data)
    if kind == "Grant":
        return Grant(*values)
    if kind == "Refusal":
        return Refusal(*values)
    queue_epoch, engines, queued, tenants, protection_step, output_lengths = values
    return QueueSnapshot(
        queue_epoch,
        engines,
        queued,
        {name: TenantSnapshot(*one) for name, one in tenants.items()},
        protection_step,
        {name: OutputLength(*one) for name, one in output_lengths.items()},
    )
