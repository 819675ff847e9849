"""Whole turns at the chat screen, and the messages that are mounted there."""

from __future__ import annotations

from typing import Any

from textual.pilot import Pilot

from ferrum_mlx.chat.conversation import Conversation
from ferrum_tui.app import ChatApp
from ferrum_tui.message import MessageWidget
from ferrum_tui.prompt import Prompt

from .driver import state, until

SIZE = (80, 30)


async def ask(pilot: Pilot[Any], text: str) -> None:
    pilot.app.query_one(Prompt).put(text)
    pilot.app.query_one(Prompt).focus()
    await pilot.press("enter")
    await pilot.pause()
    await until(pilot, lambda: not pilot.app.desk.answering and state(pilot) == "ready")


def long_conversation(turns: int) -> Conversation:
    conversation = Conversation(title="long")
    leaf = None
    for turn in range(turns):
        leaf = conversation.add("user", f"question {turn}", parent=leaf).id
        answer = conversation.add("assistant", f"answer {turn}", parent=leaf)
        answer.ending, answer.model, leaf = "stop", "m", answer.id
    conversation.leaf = leaf
    return conversation


def mounted(app: ChatApp) -> list[str]:
    return [widget.message.text for widget in app.query(MessageWidget)]
