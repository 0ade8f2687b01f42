"""Flower's grid, from which every party answers or the run ends with one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class Answering(Grid):
    """A grid whose every party answers: messages that fail or are late are one error.

    Parameters
    ----------
    grid : Grid
        What carries the messages.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @property
    def run(self) -> Any:
        """The run that messages belong to."""
        return self._grid.run

    def set_run(self, run: Any) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A new message."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Nodes that are connected."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; returns their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answers that have come to messages of these ids."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for all answers.

        Raises
        ------
        RuntimeError
            If a party fails, with its reason, or does not answer in time.
        """
        messages = list(messages)
        answers = list(self._grid.send_and_receive(messages, timeout=timeout)) if messages else []
        for answer in answers:
            if answer.has_error():
                raise RuntimeError(_reason(answer))
        asked, came = ([m.metadata.dst_node_id for m in messages], {a.metadata.src_node_id for a in answers})
        if silent := [node for node in asked if node not in came]:
            raise RuntimeError(
                f"{len(silent)} of {len(asked)} parties gave no answer within {timeout:g} s, first node {silent[0]}. "
                "See its log, or give parties more time (timeout)."
            )
        return answers


def _reason(answer: Message) -> str:
    """One line that says why a party failed."""
    lines = [line.strip() for line in (answer.error.reason or "").splitlines() if line.strip(" '>")]
    last = lines[-1].removeprefix("Exception ClientAppException occurred. Message: ") if lines else "no reason given"
    return last if last.startswith("party ") else f"node {answer.metadata.src_node_id} failed: {last}"
