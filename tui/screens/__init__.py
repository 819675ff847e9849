"""Screens above the chat: models, sessions, settings, help."""
